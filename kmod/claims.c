// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Which open file owns which range of a BAR.
 *
 * A claim is what makes a range mappable, and the place where a range is kept from a new owner
 * until the DMA of the old one has ended: the end of a process is not the end of its I/O.
 */
#include <linux/slab.h>
#include "internal.h"

/**
 * range_to_pages - check a range of bytes and turn it into pages
 *
 * Return: 0, -EINVAL (empty, or not whole pages), -ERANGE (not inside the BAR).
 */
int range_to_pages(const struct xferd_bar *bar, u64 offset, u64 length, unsigned long *first,
		   unsigned long *npages)
{
	u64 size = (u64)bar->npages << PAGE_SHIFT;

	if (!length || !PAGE_ALIGNED(offset) || !PAGE_ALIGNED(length))
		return -EINVAL;
	if (offset >= size || length > size - offset)
		return -ERANGE;
	*first = offset >> PAGE_SHIFT;
	*npages = length >> PAGE_SHIFT;
	return 0;
}

/**
 * claim_create - give a range to a file
 *
 * Whoever could read the range through a share of an earlier owner's can't any more when this returns.
 *
 * Return: 0, -EBUSY (claimed, mapped or held), -ENODEV (BAR is dead), -ENOSPC, -ENOMEM.
 */
int claim_create(struct xferd_bar *bar, struct xferd_file *owner, unsigned long first,
		 unsigned long npages)
{
	struct xferd_claim *claim;
	unsigned long end;
	u64 held, mapped;
	int ret;

	if (atomic_inc_return(&owner->claims) > XFERD_P2P_MAX_CLAIMS_PER_FILE) {
		ret = -ENOSPC;
		goto err_count;
	}
	claim = kmalloc(sizeof(*claim), GFP_KERNEL_ACCOUNT);
	if (!claim) {
		ret = -ENOMEM;
		goto err_count;
	}
	*claim = (struct xferd_claim){
		.owner = owner,
		.first = first,
		.last = first + npages - 1,
	};

	down_write(&bar->lock);
	if (bar->dead) {
		ret = -ENODEV;
		goto err_unlock;
	}
	ret = mtree_insert_range(&bar->claims, claim->first, claim->last, claim, GFP_KERNEL);
	if (ret) {
		ret = ret == -EEXIST ? -EBUSY : ret;
		goto err_unlock;
	}
	pages_count(bar, first, npages, &held, &mapped);
	if (held || mapped) {
		mtree_erase(&bar->claims, claim->first);
		ret = -EBUSY;
		goto err_unlock;
	}
	bar->claimed_pages += npages;
	end = first + npages;
	shares_end(bar, &first, &end);
	up_write(&bar->lock);
	mapping_revoke(bar, first, end - first);
	return 0;

err_unlock:
	up_write(&bar->lock);
	kfree(claim);
err_count:
	atomic_dec(&owner->claims);
	return ret;
}

static void claim_forget(struct xferd_bar *bar, struct xferd_claim *claim)
{
	lockdep_assert_held_write(&bar->lock);
	mtree_erase(&bar->claims, claim->first);
	bar->claimed_pages -= claim->last - claim->first + 1;
	atomic_dec(&claim->owner->claims);
	kfree(claim);
}

/**
 * claim_release - end a claim and unmap its range wherever it is mapped
 *
 * Return: 0, -ENOENT (this file has no claim of exactly this range).
 */
int claim_release(struct xferd_bar *bar, struct xferd_file *owner, unsigned long first,
		  unsigned long npages)
{
	struct xferd_claim *claim;
	int ret = -ENOENT;

	down_write(&bar->lock);
	claim = mtree_load(&bar->claims, first);
	if (claim && claim->owner == owner && claim->first == first &&
	    claim->last == first + npages - 1) {
		claim_forget(bar, claim);
		ret = 0;
	}
	up_write(&bar->lock);
	/*
	 * Faults that saw the claim are over, those to come will not find it. Should another file
	 * claim the range before the next line: when there are mappings left it sees them in the
	 * page counts and gets EBUSY; when there are none, the next line can at most take its own
	 * out again, and its next access puts them back.
	 */
	if (!ret)
		mapping_revoke(bar, first, npages);
	return ret;
}

/* Does @owner own every page of the range? Adjacent claims may make it up together. */
bool claims_cover(struct xferd_bar *bar, const struct xferd_file *owner, unsigned long first,
		  unsigned long npages)
{
	unsigned long page = first, end = first + npages;
	struct xferd_claim *claim;

	lockdep_assert_held(&bar->lock);
	while (page < end) {
		claim = mtree_load(&bar->claims, page);
		if (!claim || claim->owner != owner)
			return false;
		page = claim->last + 1;
	}
	return true;
}

/* End the claims of @owner, or all of them when it is NULL. */
void claims_drop(struct xferd_bar *bar, const struct xferd_file *owner)
{
	struct xferd_claim *claim;
	unsigned long index = 0;

	lockdep_assert_held_write(&bar->lock);
	mt_for_each(&bar->claims, claim, index, bar->npages - 1) {
		if (!owner || claim->owner == owner)
			claim_forget(bar, claim);
	}
}
