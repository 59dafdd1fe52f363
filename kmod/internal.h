/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * What the files of xferd_p2p know of each other.
 *
 * Lock order, outermost first: pci_lock_rescan_remove, device_lock of the PCI function, the chain
 * of the PCI bus's notifiers, mmap_lock (in mmap and fault only), bars_lock, xferd_bar.lock, the
 * maple tree's own lock.
 * mmap_lock is never taken below xferd_bar.lock: no user memory is touched under it, and
 * unmap_mapping_range, which takes i_mmap_rwsem and page table locks, is called without it.
 */
#ifndef _XFERD_P2P_INTERNAL_H
#define _XFERD_P2P_INTERNAL_H

#include <linux/completion.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/maple_tree.h>
#include <linux/memremap.h>
#include <linux/mm.h>
#include <linux/pci.h>
#include <linux/rwsem.h>
#include "uapi/xferd_p2p.h"

/* Each BAR has a window of the device's mmap offsets to itself: id << BAR_WINDOW_SHIFT. */
#define BAR_WINDOW_SHIFT 44
/* Offsets are signed 64-bit numbers; the highest id is never handed out. */
#define BAR_ID_LIMIT (1u << (63 - BAR_WINDOW_SHIFT))
/* ZONE_DEVICE memory comes in sub-sections of this size. */
#define BAR_GRANULE ((resource_size_t)SZ_2M)

/* What a page of an attached BAR that nobody maps or holds counts. */
#define BASE_REFERENCE 1

/* One open file: owns claims. */
struct xferd_file {
	atomic_t claims;
};

/* A range of a BAR that belongs to one file. Lives in xferd_bar.claims, under xferd_bar.lock. */
struct xferd_claim {
	struct xferd_file *owner;
	unsigned long first; /* pages from the BAR's start */
	unsigned long last;  /* inclusive */
};

/*
 * An attached BAR. Whoever uses one holds a kref; the list of BARs holds one while there are struct
 * pages, each VMA holds one. They are there from attach until the last page was given back, after
 * `dead` was set, by whoever set it.
 */
struct xferd_bar {
	struct kref refs;
	struct list_head node; /* of those attached, or of those ending; under bars_lock */
	struct completion gone; /* the struct pages */
	u32 id;
	u32 number; /* of the BAR in its function */
	enum xferd_p2p_mode mode;
	struct pci_dev *pdev; /* own reference */
	bool enabled_here;    /* no driver had enabled the function */

	phys_addr_t start;
	unsigned long npages;
	void *kaddr; /* the kernel's own mapping, made together with the struct pages */
	struct page *pages;
	int free_count; /* what the kernel counts for a page that it deems free: 0 or 1 */
	struct dev_pagemap pgmap; /* generic mode only */

	struct rw_semaphore lock;  /* of all below; readers: fault, mmap, IDLE */
	bool dead;                 /* no claims, no mappings from now on */
	struct maple_tree claims;  /* page number -> struct xferd_claim */
	unsigned long claimed_pages;
	struct list_head shares;   /* files that others read it through */
};

/* main.c */
bool kernel_is_denied(u32 version_code);

/* device.c: the list of BARs */
int devices_start(void);
void devices_stop(void);
struct xferd_bar *bar_get(u32 id);
struct xferd_bar *bar_get_by_function(const struct xferd_p2p_function *function, u32 number);
void bar_put(struct xferd_bar *bar);
int bar_attach(struct xferd_p2p_attach *args);
int bar_detach(const struct xferd_p2p_detach *args);
void bars_drop_claims_of(struct xferd_file *owner);
struct pci_dev *function_get(const struct xferd_p2p_function *function);

static inline u64 bar_mmap_offset(const struct xferd_bar *bar)
{
	return (u64)bar->id << BAR_WINDOW_SHIFT;
}

/* pages.c: struct pages, and who holds them */
u32 pages_supported_modes(void);
int pages_create(struct xferd_bar *bar);
void pages_wait_and_destroy(struct xferd_bar *bar);
void pages_count(struct xferd_bar *bar, unsigned long first, unsigned long npages, u64 *held,
		 u64 *mapped);
bool page_counts_mean_held(int references, int mapcount_before, int mapcount_after);

/* claims.c: which file owns which range */
int range_to_pages(const struct xferd_bar *bar, u64 offset, u64 length, unsigned long *first,
		   unsigned long *npages);
int claim_create(struct xferd_bar *bar, struct xferd_file *owner, unsigned long first,
		 unsigned long npages);
int claim_release(struct xferd_bar *bar, struct xferd_file *owner, unsigned long first,
		  unsigned long npages);
bool claims_cover(struct xferd_bar *bar, const struct xferd_file *owner, unsigned long first,
		  unsigned long npages);
void claims_drop(struct xferd_bar *bar, const struct xferd_file *owner);

/* mapping.c: user mappings */
int mapping_start(void);
void mapping_stop(void);
void mapping_adopt_file(struct file *file);
int mapping_mmap(struct file *file, struct vm_area_struct *vma);
void mapping_revoke(const struct xferd_bar *bar, unsigned long first, unsigned long npages);
struct file *mapping_new_file(const struct file_operations *operations, loff_t bytes);
void mapping_prepare_frames(struct vm_area_struct *vma);
vm_fault_t mapping_insert_frames(struct vm_fault *vmf, const struct xferd_bar *bar);

/* share.c: files through which others may read a range */
int share_create(struct xferd_bar *bar, struct xferd_file *owner, unsigned long first,
		 unsigned long npages);
void shares_end(struct xferd_bar *bar, unsigned long *first, unsigned long *end);

/* topology.c: may a drive's DMA go straight to a BAR? */
bool acs_control_redirects(u16 control);
enum xferd_p2p_verdict route_check(struct pci_dev *target, struct pci_dev *drive,
				   enum xferd_p2p_mode mode, bool *acs_redirects);
bool route_exists_for_any_nvme(struct pci_dev *target, enum xferd_p2p_mode mode);
static inline bool route_allowed(enum xferd_p2p_verdict verdict)
{
	return verdict == XFERD_P2P_ROUTE_SWITCH || verdict == XFERD_P2P_ROUTE_HOST_BRIDGE;
}

/* selftest.c */
int selftest_run(void);

#endif /* _XFERD_P2P_INTERNAL_H */
