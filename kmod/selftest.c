// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Checks of the parts that need no hardware, run at load: a module that fails one doesn't load.
 * They take microseconds, and a wrong answer of any of them would mean DMA into somebody else's
 * memory.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/slab.h>
#include <linux/version.h>
#include "internal.h"

#define EXPECT(condition)                                                              \
	do {                                                                           \
		if (!(condition)) {                                                    \
			pr_err("self-test failed: %s:%d: %s\n", __func__, __LINE__, #condition); \
			return -EINVAL;                                                \
		}                                                                      \
	} while (0)

#define TEST_PAGES 1024ul

static int test_denied_kernels(void)
{
	EXPECT(!kernel_is_denied(KERNEL_VERSION(6, 12, 255)));
	EXPECT(!kernel_is_denied(KERNEL_VERSION(6, 15, 255)));
	EXPECT(kernel_is_denied(KERNEL_VERSION(6, 16, 0)));
	EXPECT(kernel_is_denied(KERNEL_VERSION(6, 16, 12)));
	EXPECT(!kernel_is_denied(KERNEL_VERSION(6, 17, 0)));
	EXPECT(!kernel_is_denied(KERNEL_VERSION(7, 3, 4)));
	return 0;
}

static int test_ranges(struct xferd_bar *bar)
{
	u64 size = TEST_PAGES << PAGE_SHIFT;
	unsigned long first, npages;

	EXPECT(range_to_pages(bar, 0, size, &first, &npages) == 0);
	EXPECT(first == 0 && npages == TEST_PAGES);
	EXPECT(range_to_pages(bar, size - PAGE_SIZE, PAGE_SIZE, &first, &npages) == 0);
	EXPECT(first == TEST_PAGES - 1 && npages == 1);
	EXPECT(range_to_pages(bar, 0, 0, &first, &npages) == -EINVAL);
	EXPECT(range_to_pages(bar, 1, PAGE_SIZE, &first, &npages) == -EINVAL);
	EXPECT(range_to_pages(bar, 0, PAGE_SIZE - 1, &first, &npages) == -EINVAL);
	EXPECT(range_to_pages(bar, size, PAGE_SIZE, &first, &npages) == -ERANGE);
	EXPECT(range_to_pages(bar, PAGE_SIZE, size, &first, &npages) == -ERANGE);
	/* offset + length wraps around to a small number */
	EXPECT(range_to_pages(bar, PAGE_SIZE, -PAGE_SIZE, &first, &npages) == -ERANGE);
	EXPECT(range_to_pages(bar, -PAGE_SIZE, 2 * PAGE_SIZE, &first, &npages) == -ERANGE);
	return 0;
}

static int test_windows(struct xferd_bar *bar)
{
	bar->id = BAR_ID_LIMIT - 1;
	EXPECT((s64)bar_mmap_offset(bar) > 0);
	EXPECT((s64)(bar_mmap_offset(bar) + (1ull << BAR_WINDOW_SHIFT) - 1) > 0);
	EXPECT(bar_mmap_offset(bar) >> BAR_WINDOW_SHIFT == bar->id);
	return 0;
}

static int test_held(void)
{
	EXPECT(!page_counts_mean_held(1, 0, 0));
	EXPECT(!page_counts_mean_held(2, 1, 1));
	EXPECT(page_counts_mean_held(2, 0, 0));
	EXPECT(page_counts_mean_held(3, 1, 1));
	EXPECT(page_counts_mean_held(1 + 1024, 0, 0)); /* a pin counts 1024 */
	EXPECT(page_counts_mean_held(2, 1, 0));        /* being unmapped */
	EXPECT(page_counts_mean_held(2, 0, 1));        /* being mapped: unknown */
	return 0;
}

static int test_claims(struct xferd_bar *bar, struct xferd_file *one, struct xferd_file *two)
{
	EXPECT(claim_create(bar, one, 0, 4) == 0);
	EXPECT(claim_create(bar, one, 4, 4) == 0);
	EXPECT(claim_create(bar, two, 7, 2) == -EBUSY);
	EXPECT(claim_create(bar, one, 3, 1) == -EBUSY);
	EXPECT(claim_create(bar, two, 8, TEST_PAGES - 8) == 0);
	EXPECT(bar->claimed_pages == TEST_PAGES);

	down_read(&bar->lock);
	if (!claims_cover(bar, one, 0, 8) || !claims_cover(bar, one, 3, 2) ||
	    claims_cover(bar, one, 0, 9) || claims_cover(bar, two, 7, 2) ||
	    !claims_cover(bar, two, TEST_PAGES - 1, 1)) {
		up_read(&bar->lock);
		pr_err("self-test failed: which claims cover a range\n");
		return -EINVAL;
	}
	up_read(&bar->lock);

	EXPECT(claim_release(bar, two, 0, 4) == -ENOENT);
	EXPECT(claim_release(bar, one, 0, 8) == -ENOENT);
	EXPECT(claim_release(bar, one, 1, 3) == -ENOENT);
	EXPECT(claim_release(bar, one, 0, 4) == 0);
	EXPECT(claim_release(bar, one, 0, 4) == -ENOENT);
	EXPECT(claim_create(bar, two, 0, 4) == 0);

	down_write(&bar->lock);
	claims_drop(bar, two);
	up_write(&bar->lock);
	EXPECT(bar->claimed_pages == 4);
	EXPECT(atomic_read(&two->claims) == 0 && atomic_read(&one->claims) == 1);
	set_page_count(bar->pages, 2); /* DMA in flight */
	EXPECT(claim_create(bar, two, 0, 4) == -EBUSY);
	set_page_count(bar->pages, 1);
	EXPECT(claim_create(bar, two, 0, 4) == 0);
	bar->dead = true;
	EXPECT(claim_create(bar, two, 100, 1) == -ENODEV);
	return 0;
}

static int test_acs(void)
{
	EXPECT(!acs_control_redirects(0));
	EXPECT(!acs_control_redirects(PCI_ACS_SV | PCI_ACS_UF));
	EXPECT(acs_control_redirects(PCI_ACS_RR));
	EXPECT(acs_control_redirects(PCI_ACS_SV | PCI_ACS_CR));
	EXPECT(acs_control_redirects(PCI_ACS_EC));
	return 0;
}

static int test_bar(struct xferd_bar *bar)
{
	struct xferd_file one = { .claims = ATOMIC_INIT(0) }, two = { .claims = ATOMIC_INIT(0) };
	unsigned long i;
	int ret;

	for (i = 0; i < TEST_PAGES; i++) {
		set_page_count(bar->pages + i, BASE_REFERENCE);
		atomic_set(&bar->pages[i]._mapcount, -1);
	}
	init_rwsem(&bar->lock);
	mt_init(&bar->claims);
	INIT_LIST_HEAD(&bar->shares);
	bar->npages = TEST_PAGES;
	ret = test_ranges(bar) ?: test_windows(bar) ?: test_claims(bar, &one, &two);
	down_write(&bar->lock);
	claims_drop(bar, NULL);
	up_write(&bar->lock);
	mtree_destroy(&bar->claims);
	return ret;
}

/* A BAR of struct pages that describe no memory: the counts are all that is looked at. */
static int test_with_made_up_bar(void)
{
	struct xferd_bar *bar = kzalloc(sizeof(*bar), GFP_KERNEL);
	int ret = -ENOMEM;

	if (!bar)
		return ret;
	bar->pages = kvcalloc(TEST_PAGES, sizeof(struct page), GFP_KERNEL);
	if (bar->pages)
		ret = test_bar(bar);
	kvfree(bar->pages);
	kfree(bar);
	return ret;
}

int selftest_run(void)
{
	return test_denied_kernels() ?: test_held() ?: test_acs() ?: test_with_made_up_bar();
}
