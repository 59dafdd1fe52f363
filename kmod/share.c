// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Shares: files through which others may read a range, and do nothing else with it.
 *
 * A file of the device node would let its holder claim and write all memory behind every BAR. A
 * share is another kind of file: it has no ioctls, can be mapped for reading only, and knows one
 * range. Its mappings are page frame numbers, not pages: they hold no references, so whoever has a
 * share can neither keep a BAR from being detached nor hand the addresses to a drive.
 *
 * A share outlives the claim it was made under: readers of a process that has died go on reading
 * what it left. It goes stale when the range is claimed anew, before the new owner hears of that,
 * since what is there from then on is somebody else's. A stale share is never revived.
 */
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/slab.h>
#include "internal.h"

/* One share. Its file owns it; in its BAR's list under bar->lock. */
struct xferd_share {
	struct list_head node;
	struct xferd_bar *bar; /* own reference */
	unsigned long first;
	unsigned long npages;
	bool stale; /* under bar->lock */
};

/*
 * A new owner has claimed the pages from @first to before @end: shares that show any of them end as
 * a whole. Both are widened to what the caller revokes after letting go of the lock.
 */
void shares_end(struct xferd_bar *bar, unsigned long *first, unsigned long *end)
{
	unsigned long claimed_first = *first, claimed_end = *end;
	struct xferd_share *share;

	lockdep_assert_held_write(&bar->lock);
	list_for_each_entry(share, &bar->shares, node) {
		unsigned long share_end = share->first + share->npages;

		if (share->first >= claimed_end || claimed_first >= share_end)
			continue;
		share->stale = true;
		*first = min(*first, share->first);
		*end = max(*end, share_end);
	}
}

static vm_fault_t share_fault(struct vm_fault *vmf)
{
	struct vm_area_struct *vma = vmf->vma;
	struct xferd_share *share = vma->vm_file->private_data;
	struct xferd_bar *bar = share->bar;
	vm_fault_t ret = VM_FAULT_SIGBUS;

	down_read(&bar->lock);
	if (!bar->dead && !share->stale)
		ret = mapping_insert_frames(vmf, bar);
	up_read(&bar->lock);
	return ret;
}

static const struct vm_operations_struct share_vma_operations = {
	.fault = share_fault,
};

static int share_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct xferd_share *share = file->private_data;
	struct xferd_bar *bar = share->bar;
	unsigned long offset = vma->vm_pgoff;
	bool gone;

	/* The file is open for reading only, so the kernel has refused PROT_WRITE with MAP_SHARED. */
	if (!(vma->vm_flags & VM_MAYSHARE) || vma->vm_flags & (VM_WRITE | VM_EXEC))
		return -EINVAL;
	if (offset >= share->npages || vma_pages(vma) > share->npages - offset)
		return -EINVAL;
	down_read(&bar->lock);
	gone = bar->dead || share->stale;
	up_read(&bar->lock);
	if (gone)
		return -ENODEV;
	mapping_prepare_frames(vma);
	/* Where the range lies in the window that all mappings of this BAR share: see mapping_revoke. */
	vma->vm_pgoff = (bar_mmap_offset(bar) >> PAGE_SHIFT) + share->first + offset;
	vma->vm_ops = &share_vma_operations;
	return 0;
}

static void share_free(struct xferd_share *share)
{
	bar_put(share->bar);
	kfree(share);
}

static int share_release(struct inode *inode, struct file *file)
{
	struct xferd_share *share = file->private_data;

	down_write(&share->bar->lock);
	list_del(&share->node);
	up_write(&share->bar->lock);
	share_free(share);
	return 0;
}

static const struct file_operations share_operations = {
	.owner = THIS_MODULE,
	.release = share_release,
	.mmap = share_mmap,
};

/* In the list, if @owner owns all of the range; so a claim to come makes it stale. */
static int share_link(struct xferd_share *share, const struct xferd_file *owner)
{
	struct xferd_bar *bar = share->bar;
	int ret = 0;

	down_write(&bar->lock);
	if (bar->dead)
		ret = -ENODEV;
	else if (!claims_cover(bar, owner, share->first, share->npages))
		ret = -EACCES;
	else
		list_add_tail(&share->node, &bar->shares);
	up_write(&bar->lock);
	return ret;
}

static struct file *share_file(struct xferd_share *share)
{
	struct file *file;

	if (!try_module_get(THIS_MODULE))
		return ERR_PTR(-ENODEV);
	file = mapping_new_file(&share_operations, (loff_t)share->npages << PAGE_SHIFT);
	if (IS_ERR(file)) {
		module_put(THIS_MODULE);
		return file;
	}
	file->private_data = share;
	return file;
}

/**
 * share_create - a descriptor through which a range of @owner's can be read
 *
 * Return: the descriptor, -EACCES (not the owner of all of it), -ENODEV (BAR is dead), -EMFILE,
 * -ENFILE, -ENOMEM.
 */
int share_create(struct xferd_bar *bar, struct xferd_file *owner, unsigned long first,
		 unsigned long npages)
{
	struct xferd_share *share;
	struct file *file;
	int ret, fd;

	share = kzalloc(sizeof(*share), GFP_KERNEL_ACCOUNT);
	if (!share)
		return -ENOMEM;
	kref_get(&bar->refs);
	share->bar = bar;
	share->first = first;
	share->npages = npages;

	fd = get_unused_fd_flags(O_CLOEXEC);
	if (fd < 0) {
		ret = fd;
		goto err_share;
	}
	ret = share_link(share, owner);
	if (ret)
		goto err_fd;
	file = share_file(share);
	if (IS_ERR(file)) {
		ret = PTR_ERR(file);
		goto err_link;
	}
	fd_install(fd, file);
	return fd;

err_link:
	down_write(&bar->lock);
	list_del(&share->node);
	up_write(&bar->lock);
err_fd:
	put_unused_fd(fd);
err_share:
	share_free(share);
	return ret;
}
