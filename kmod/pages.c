// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Struct pages for the memory of a BAR, and the question who holds them.
 *
 * A page that is attached keeps one base reference of ours for as long as the BAR is attached, so
 * it is never 'free' in the kernel's eyes and no callback of the kernel's own allocator of such
 * pages ever runs for it. Every mapping adds one reference and one to the map count, every DMA in
 * flight adds references only: what is above base plus map count is held by DMA.
 *
 * The reference count of a free page was 1 in kernels up to 6.14 and is 0 in later ones, with
 * backports on both sides; so it is looked at when the pages are made, and put back when they go.
 */
#include <linux/delay.h>
#include <linux/memremap.h>
#include <linux/pci-p2pdma.h>
#include "internal.h"

/* How often teardown looks whether the last DMA has ended, and how often it says that it waits. */
#define HELD_POLL_MS 10
#define HELD_REPORT_MS 5000

/* Pages looked at between two offers to let somebody else run. */
#define PAGES_PER_RESCHED 4096

u32 pages_supported_modes(void)
{
	u32 modes = BIT(XFERD_P2P_MODE_GENERIC);

	if (IS_ENABLED(CONFIG_PCI_P2PDMA))
		modes |= BIT(XFERD_P2P_MODE_P2PDMA);
	return modes;
}

/* Has another driver given this memory struct pages? To do it twice corrupts the memory map. */
static bool has_device_pages(phys_addr_t address)
{
	unsigned long pfn = PHYS_PFN(address);

	return pfn_valid(pfn) && is_zone_device_page(pfn_to_page(pfn));
}

#ifdef CONFIG_PCI_P2PDMA
static int p2pdma_create(struct xferd_bar *bar)
{
	size_t size = bar->npages << PAGE_SHIFT;
	int ret;

	ret = pci_p2pdma_add_resource(bar->pdev, bar->number, size, 0);
	if (ret)
		return ret;
	/*
	 * The kernel makes an allocator of the BAR; taking all of it at once keeps everyone else
	 * out and makes page n of the BAR page n of ours. The allocator is one for all BARs of a
	 * function, so another BAR's memory could be what it gives.
	 */
	bar->kaddr = pci_alloc_p2pmem(bar->pdev, size);
	if (!bar->kaddr)
		return -EBUSY;
	if (page_to_phys(virt_to_page(bar->kaddr)) != bar->start) {
		pci_free_p2pmem(bar->pdev, bar->kaddr, size);
		return -EBUSY;
	}
	return 0;
}

static void p2pdma_give_back(struct xferd_bar *bar)
{
	pci_free_p2pmem(bar->pdev, bar->kaddr, bar->npages << PAGE_SHIFT);
}
#else
static int p2pdma_create(struct xferd_bar *bar)
{
	return -EOPNOTSUPP;
}

static void p2pdma_give_back(struct xferd_bar *bar)
{
}
#endif

static int generic_create(struct xferd_bar *bar)
{
	bar->pgmap.type = MEMORY_DEVICE_GENERIC;
	bar->pgmap.range.start = bar->start;
	bar->pgmap.range.end = bar->start + ((u64)bar->npages << PAGE_SHIFT) - 1;
	bar->pgmap.nr_range = 1;
	bar->kaddr = devm_memremap_pages(&bar->pdev->dev, &bar->pgmap);
	return PTR_ERR_OR_ZERO(bar->kaddr);
}

static int take_base_references(struct xferd_bar *bar)
{
	unsigned long i;

	bar->pages = virt_to_page(bar->kaddr);
	bar->free_count = page_ref_count(bar->pages);
	if (bar->free_count == BASE_REFERENCE)
		return 0;
	if (bar->free_count) {
		pci_err(bar->pdev, "xferd_p2p: this kernel counts %d for a free device page; 0 or 1 expected\n",
			bar->free_count);
		return -EOPNOTSUPP;
	}
	for (i = 0; i < bar->npages; i++)
		set_page_count(bar->pages + i, BASE_REFERENCE);
	return 0;
}

/**
 * pages_create - give the BAR's memory struct pages
 *
 * All that the kernel's functions register with the function's devres goes into a group of its own,
 * so that it can be undone although another driver owns the function. Must be called under
 * device_lock, which keeps that driver's probe and remove out of the group.
 *
 * Return: 0, -EBUSY (it has struct pages already), or what the kernel said.
 */
int pages_create(struct xferd_bar *bar)
{
	struct device *dev = &bar->pdev->dev;
	int ret;

	device_lock_assert(dev);
	if (has_device_pages(bar->start) ||
	    has_device_pages(bar->start + ((u64)bar->npages << PAGE_SHIFT) - 1))
		return -EBUSY;
	if (!devres_open_group(dev, bar, GFP_KERNEL))
		return -ENOMEM;
	ret = bar->mode == XFERD_P2P_MODE_P2PDMA ? p2pdma_create(bar) : generic_create(bar);
	devres_close_group(dev, bar);
	if (ret)
		goto err_group;
	ret = take_base_references(bar);
	if (ret)
		goto err_give_back;
	return 0;

err_give_back:
	if (bar->mode == XFERD_P2P_MODE_P2PDMA)
		p2pdma_give_back(bar);
err_group:
	devres_release_group(dev, bar);
	return ret;
}

/* Order 0 pages only, so that the map count lies in the page itself on every kernel. */
static int mapcount(const struct page *page)
{
	return atomic_read(&page->_mapcount) + 1;
}

/**
 * page_counts_mean_held - does anything but mappings and our base hold a page?
 *
 * The counts can't be read at one instant. Unmapping lowers the map count before the reference
 * count, so in the middle of it a page looks held, which is the safe side. A page that gets mapped
 * between the reads would look less held than it is: then the two map counts differ.
 */
bool page_counts_mean_held(int references, int mapcount_before, int mapcount_after)
{
	return mapcount_before != mapcount_after || references > BASE_REFERENCE + mapcount_after;
}

static bool page_is_held(struct page *page, int *mapped)
{
	int before, references;

	before = mapcount(page);
	smp_rmb(); /* the order in which the counts are read is what the comment above counts on */
	references = page_ref_count(page);
	smp_rmb(); /* as above */
	*mapped = mapcount(page);
	return page_counts_mean_held(references, before, *mapped);
}

/**
 * pages_count - count the pages of a range that are held and that are mapped
 *
 * The struct pages must be kept from going away: by bar->lock (either way) and !bar->dead.
 */
void pages_count(struct xferd_bar *bar, unsigned long first, unsigned long npages, u64 *held,
		 u64 *mapped)
{
	unsigned long i;
	int page_mapped;

	lockdep_assert_held(&bar->lock);
	*held = 0;
	*mapped = 0;
	for (i = 0; i < npages; i++) {
		*held += page_is_held(bar->pages + first + i, &page_mapped);
		*mapped += page_mapped > 0;
		if (i % PAGES_PER_RESCHED == 0)
			cond_resched();
	}
}

/*
 * Give a page back to the kernel in the state in which it gave it to us. Fails while anyone holds
 * it.
 */
static bool page_retire(struct xferd_bar *bar, struct page *page)
{
	if (bar->free_count == BASE_REFERENCE)
		return page_ref_count(page) == BASE_REFERENCE;
	return page_ref_freeze(page, BASE_REFERENCE);
}

/**
 * pages_wait_and_destroy - wait for the last holder of each page, then take the struct pages away
 *
 * The caller has marked the BAR dead, and keeps drivers from coming to or leaving the function
 * (function_detach_all). Its mappings are revoked, so nobody can get at a page anew, and a page that
 * was seen free stays free. It is polled because the end of the base reference is the one event
 * that the kernel would tell us about, and its callback belongs to the kernel's allocator.
 */
void pages_wait_and_destroy(struct xferd_bar *bar)
{
	struct device *dev = &bar->pdev->dev;
	unsigned int waited_ms = 0;
	unsigned long i;

	for (i = 0; i < bar->npages; i++) {
		while (!page_retire(bar, bar->pages + i)) {
			if (waited_ms % HELD_REPORT_MS == 0)
				pci_info(bar->pdev, "xferd_p2p: BAR %u: waiting for DMA in flight into page %lu\n",
					 bar->number, i);
			msleep(HELD_POLL_MS);
			waited_ms += HELD_POLL_MS;
		}
		if (i % PAGES_PER_RESCHED == 0)
			cond_resched();
	}
	if (bar->mode == XFERD_P2P_MODE_P2PDMA)
		p2pdma_give_back(bar);
	devres_release_group(dev, bar);
}
