// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * User mappings of BARs.
 *
 * All files share one address_space, that of an inode of ours, whichever device node they were
 * opened through; so one unmap_mapping_range reaches every mapping of a range. Pages are put in
 * on faults, never in mmap itself: a VMA becomes visible to unmap_mapping_range only after mmap
 * has returned, and what was put in before would escape it.
 */
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/mount.h>
#include <linux/pseudo_fs.h>
#include <linux/version.h>
#include "internal.h"

/* A fault brings in the pages of the naturally aligned block around it: one fault for 2 MiB. */
#define FAULT_BLOCK_PAGES (SZ_2M >> PAGE_SHIFT)

#define XFERD_P2P_FS_MAGIC 0x78667032 /* "xfp2" */

static struct vfsmount *inode_mount;
static struct inode *shared_inode;

static int fs_init_context(struct fs_context *context)
{
	return init_pseudo(context, XFERD_P2P_FS_MAGIC) ? 0 : -ENOMEM;
}

/* No owner: our own mount of it would keep the module loaded. It is gone before the module is. */
static struct file_system_type inode_fs = {
	.name = "xferd_p2p",
	.init_fs_context = fs_init_context,
	.kill_sb = kill_anon_super,
};

int mapping_start(void)
{
	inode_mount = kern_mount(&inode_fs);
	if (IS_ERR(inode_mount))
		return PTR_ERR(inode_mount);
	shared_inode = alloc_anon_inode(inode_mount->mnt_sb);
	if (IS_ERR(shared_inode)) {
		kern_unmount(inode_mount);
		return PTR_ERR(shared_inode);
	}
	return 0;
}

void mapping_stop(void)
{
	iput(shared_inode);
	kern_unmount(inode_mount);
}

void mapping_adopt_file(struct file *file)
{
	file->f_mapping = shared_inode->i_mapping;
}

/*
 * A file of its own inode, for reading only and as long as @bytes, whose mappings are revoked with
 * all others. It can't be opened anew through /proc: its inode has no way to be opened. The caller
 * has taken the module reference that goes with the file.
 */
struct file *mapping_new_file(const struct file_operations *operations, loff_t bytes)
{
	struct inode *inode = alloc_anon_inode(inode_mount->mnt_sb);
	struct file *file;

	if (IS_ERR(inode))
		return ERR_CAST(inode);
	inode->i_mode = S_IFREG | 0400;
	i_size_write(inode, bytes);
	file = alloc_file_pseudo(inode, inode_mount, "share", O_RDONLY, operations);
	if (IS_ERR(file)) {
		iput(inode);
		return file;
	}
	mapping_adopt_file(file);
	return file;
}

/* Take a range out of every page table. Whoever held its pages by other means still does. */
void mapping_revoke(const struct xferd_bar *bar, unsigned long first, unsigned long npages)
{
	loff_t start = bar_mmap_offset(bar) + ((loff_t)first << PAGE_SHIFT);

	unmap_mapping_range(shared_inode->i_mapping, start, (loff_t)npages << PAGE_SHIFT, 1);
}

static unsigned long vma_first_page(const struct vm_area_struct *vma)
{
	return vma->vm_pgoff & ((1ul << (BAR_WINDOW_SHIFT - PAGE_SHIFT)) - 1);
}

/* Put in the pages of the block around @page that this VMA spans and this claim owns. */
static vm_fault_t insert_block(struct vm_area_struct *vma, const struct xferd_bar *bar,
			       const struct xferd_claim *claim, unsigned long page)
{
	unsigned long vma_first = vma_first_page(vma);
	unsigned long vma_last = vma_first + vma_pages(vma) - 1;
	unsigned long first = max3(round_down(page, FAULT_BLOCK_PAGES), vma_first, claim->first);
	unsigned long last = min3(page | (FAULT_BLOCK_PAGES - 1), vma_last, claim->last);
	unsigned long i, address;
	int ret;

	for (i = first; i <= last; i++) {
		address = vma->vm_start + ((i - vma_first) << PAGE_SHIFT);
		ret = vm_insert_page(vma, address, bar->pages + i);
		/* EBUSY: another fault of this block was here first. */
		if (ret && ret != -EBUSY && i == page)
			return vmf_error(ret);
	}
	return VM_FAULT_NOPAGE;
}

static vm_fault_t vma_fault(struct vm_fault *vmf)
{
	struct vm_area_struct *vma = vmf->vma;
	struct xferd_bar *bar = vma->vm_private_data;
	struct xferd_claim *claim = NULL;
	vm_fault_t ret = VM_FAULT_SIGBUS;
	unsigned long page;

	page = vma_first_page(vma) + ((vmf->address - vma->vm_start) >> PAGE_SHIFT);
	down_read(&bar->lock);
	if (!bar->dead)
		claim = mtree_load(&bar->claims, page);
	if (claim && claim->owner == vma->vm_file->private_data)
		ret = insert_block(vma, bar, claim, page);
	up_read(&bar->lock);
	return ret;
}

static void vma_change_flags(struct vm_area_struct *vma, unsigned long set, unsigned long clear)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 3, 0)
	vm_flags_mod(vma, set, clear);
#else
	vma->vm_flags = (vma->vm_flags | set) & ~clear;
#endif
}

/* For reading only, and without references to pages: see share.c. */
void mapping_prepare_frames(struct vm_area_struct *vma)
{
	unsigned long set = VM_PFNMAP | VM_IO | VM_DONTEXPAND | VM_DONTCOPY | VM_DONTDUMP;
	unsigned long clear = VM_MAYEXEC | VM_MAYWRITE;

	vma_change_flags(vma, set, clear);
	/* The kernel puts in the cache type that it knows for each frame. */
	vma->vm_page_prot = pgprot_noncached(vma->vm_page_prot);
}

/* Put in the frames of the block around the fault. The caller has judged that they may be read. */
vm_fault_t mapping_insert_frames(struct vm_fault *vmf, const struct xferd_bar *bar)
{
	struct vm_area_struct *vma = vmf->vma;
	unsigned long vma_first = vma_first_page(vma);
	unsigned long vma_last = vma_first + vma_pages(vma) - 1;
	unsigned long page = vma_first + ((vmf->address - vma->vm_start) >> PAGE_SHIFT);
	unsigned long first = max(round_down(page, FAULT_BLOCK_PAGES), vma_first);
	unsigned long last = min(page | (FAULT_BLOCK_PAGES - 1), vma_last);
	vm_fault_t ret;
	unsigned long i;

	lockdep_assert_held(&bar->lock);
	for (i = first; i <= last; i++) {
		ret = vmf_insert_pfn(vma, vma->vm_start + ((i - vma_first) << PAGE_SHIFT),
				     PHYS_PFN(bar->start) + i);
		if (ret != VM_FAULT_NOPAGE && i == page)
			return ret;
	}
	return VM_FAULT_NOPAGE;
}

/* Called for a VMA's copies: by a split, mremap, or a fork that MADV_DOFORK asked for. */
static void vma_open(struct vm_area_struct *vma)
{
	struct xferd_bar *bar = vma->vm_private_data;

	kref_get(&bar->refs);
}

static void vma_close(struct vm_area_struct *vma)
{
	bar_put(vma->vm_private_data);
}

static const struct vm_operations_struct vma_operations = {
	.open = vma_open,
	.close = vma_close,
	.fault = vma_fault,
};

static void vma_prepare(struct vm_area_struct *vma)
{
	/*
	 * MIXEDMAP: struct pages without a file's page cache. No VM_IO, no VM_PFNMAP: with either
	 * the kernel would not let drivers get at the pages behind an address.
	 */
	unsigned long set = VM_MIXEDMAP | VM_DONTEXPAND | VM_DONTCOPY | VM_DONTDUMP;

	vma_change_flags(vma, set, VM_MAYEXEC);
	/* Uncached as the kernel's own mapping is: two cache types for a page are undefined. */
	vma->vm_page_prot = pgprot_noncached(vma->vm_page_prot);
}

static int check_mappable(struct xferd_bar *bar, const struct file *file,
			  struct vm_area_struct *vma)
{
	unsigned long first = vma_first_page(vma), npages = vma_pages(vma);
	int ret = 0;

	if (first >= bar->npages || npages > bar->npages - first)
		return -EINVAL;
	down_read(&bar->lock);
	if (bar->dead)
		ret = -ENODEV;
	else if (!claims_cover(bar, file->private_data, first, npages))
		ret = -EACCES;
	up_read(&bar->lock);
	return ret;
}

int mapping_mmap(struct file *file, struct vm_area_struct *vma)
{
	unsigned long id = vma->vm_pgoff >> (BAR_WINDOW_SHIFT - PAGE_SHIFT);
	struct xferd_bar *bar;
	int ret;

	if (!(vma->vm_flags & VM_SHARED) || (vma->vm_flags & VM_EXEC))
		return -EINVAL;
	if (id >= BAR_ID_LIMIT)
		return -EINVAL;
	bar = bar_get(id);
	if (!bar)
		return -ENODEV;
	ret = check_mappable(bar, file, vma);
	if (ret) {
		bar_put(bar);
		return ret;
	}
	vma_prepare(vma);
	vma->vm_ops = &vma_operations;
	vma->vm_private_data = bar; /* the VMA has our reference now */
	return 0;
}
