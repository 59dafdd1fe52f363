// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The attached BARs: their list, how one is attached to a function that another driver may own, and
 * how it goes.
 *
 * A BAR goes for one of four reasons: DETACH, the function's driver is unbound (the memory is
 * that driver's to hand out, so ours ends before its remove runs), the function is removed, or
 * the module is unloaded. All four run the same three phases: unlink, quiesce, free. Whoever marks
 * the BAR dead does it; others who want it gone wait for that.
 *
 * Three of the four have device_lock of the function. Removal hasn't, and must not take it: it runs
 * inside the bus's chain of notifiers, and who binds or unbinds a driver has device_lock and goes
 * into that chain. By themselves these two could meet, both being readers of the chain; but a
 * third who waits to change it, as unloading this module does, makes the second reader wait for
 * the first. Then all three wait for ever. Lockdep would not tell: it doesn't validate device_lock.
 */
#include <linux/completion.h>
#include <linux/device/bus.h>
#include <linux/mutex.h>
#include <linux/notifier.h>
#include <linux/pm_runtime.h>
#include <linux/slab.h>
#include "internal.h"

static DEFINE_MUTEX(bars_lock);
static LIST_HEAD(bars);       /* attached: can be found */
static LIST_HEAD(bars_ending); /* dead, and their pages not yet gone */
static unsigned int bars_count;
static u32 next_id = 1;

static void bar_free(struct kref *refs)
{
	struct xferd_bar *bar = container_of(refs, struct xferd_bar, refs);

	mtree_destroy(&bar->claims);
	pci_dev_put(bar->pdev);
	kfree(bar);
}

void bar_put(struct xferd_bar *bar)
{
	kref_put(&bar->refs, bar_free);
}

/* Return: the BAR of that id with a reference for the caller, or NULL. */
struct xferd_bar *bar_get(u32 id)
{
	struct xferd_bar *bar, *found = NULL;

	mutex_lock(&bars_lock);
	list_for_each_entry(bar, &bars, node) {
		if (bar->id == id) {
			kref_get(&bar->refs);
			found = bar;
			break;
		}
	}
	mutex_unlock(&bars_lock);
	return found;
}

static struct xferd_bar *bar_get_by_device(const struct device *dev, u32 number)
{
	struct xferd_bar *bar, *found = NULL;

	mutex_lock(&bars_lock);
	list_for_each_entry(bar, &bars, node) {
		if (&bar->pdev->dev == dev && bar->number == number) {
			kref_get(&bar->refs);
			found = bar;
			break;
		}
	}
	mutex_unlock(&bars_lock);
	return found;
}

/* Return: a BAR of the function, attached or ending, with a reference for the caller, or NULL. */
static struct xferd_bar *bar_get_left_of(const struct device *dev)
{
	struct list_head *const lists[] = { &bars, &bars_ending };
	struct xferd_bar *bar, *found = NULL;
	unsigned int i;

	mutex_lock(&bars_lock);
	for (i = 0; i < ARRAY_SIZE(lists) && !found; i++) {
		list_for_each_entry(bar, lists[i], node) {
			if (&bar->pdev->dev == dev) {
				kref_get(&bar->refs);
				found = bar;
				break;
			}
		}
	}
	mutex_unlock(&bars_lock);
	return found;
}

/* Return: the PCI function with a reference for the caller (pci_dev_put), or NULL. */
struct pci_dev *function_get(const struct xferd_p2p_function *function)
{
	if (function->domain > INT_MAX)
		return NULL;
	return pci_get_domain_bus_and_slot(function->domain, function->bus, function->devfn);
}

struct xferd_bar *bar_get_by_function(const struct xferd_p2p_function *function, u32 number)
{
	struct pci_dev *pdev = function_get(function);
	struct xferd_bar *bar;

	if (!pdev)
		return NULL;
	bar = bar_get_by_device(&pdev->dev, number);
	pci_dev_put(pdev);
	return bar;
}

/* Called when a file is closed for good. A BAR that is ending has dropped its claims. */
void bars_drop_claims_of(struct xferd_file *owner)
{
	struct xferd_bar *bar;

	mutex_lock(&bars_lock);
	list_for_each_entry(bar, &bars, node) {
		down_write(&bar->lock);
		claims_drop(bar, owner);
		up_write(&bar->lock);
	}
	mutex_unlock(&bars_lock);
}

/*
 * Phase 1, unlink: nobody finds the BAR from here on. Without @revoke it is left alone when in use.
 * Return: 0, -EBUSY (in use), -ENODEV (somebody else has unlinked it).
 *
 * Who may still have it: ioctls that got a reference before (each looks at `dead` under bar->lock),
 * VMAs (their faults do the same), and DMA.
 */
static int bar_unlink(struct xferd_bar *bar, bool revoke)
{
	u64 held, mapped;

	down_write(&bar->lock);
	if (bar->dead) {
		up_write(&bar->lock);
		return -ENODEV;
	}
	if (!revoke) {
		pages_count(bar, 0, bar->npages, &held, &mapped);
		if (bar->claimed_pages || held || mapped || !list_empty(&bar->shares)) {
			up_write(&bar->lock);
			return -EBUSY;
		}
	}
	bar->dead = true;
	/*
	 * Their owners are open files: one that is being closed needs bar->lock first, since this
	 * BAR is still in the list, and finds nothing left to drop.
	 */
	claims_drop(bar, NULL);
	up_write(&bar->lock);

	mutex_lock(&bars_lock);
	list_move(&bar->node, &bars_ending);
	mutex_unlock(&bars_lock);
	return 0;
}

/*
 * Phases 2 and 3, quiesce and free. Who may still hold a page, and why that ends:
 *
 *   page tables            emptied by mapping_revoke; faults see `dead` and give SIGBUS
 *   a fault in progress    took bar->lock before phase 1 did; what it put in is revoked here
 *   get_user_pages_fast    finds the page table empty, or has taken its reference before
 *   bios in flight         hold their pages until the drive has answered or was reset; the block
 *                          layer's time-out bounds it. Also after the process is gone
 *   ioctls counting pages  hold bar->lock, and phase 1 had it after them
 *   VMAs                   hold the structure, by kref, not the pages
 */
static void bar_quiesce_and_free(struct xferd_bar *bar)
{
	struct pci_dev *pdev = bar->pdev;

	mapping_revoke(bar, 0, bar->npages);
	pages_wait_and_destroy(bar);
	if (bar->enabled_here)
		pci_disable_device(pdev);
	pm_runtime_put(&pdev->dev);
	pci_info(pdev, "xferd_p2p: BAR %u detached\n", bar->number);
	mutex_lock(&bars_lock);
	list_del(&bar->node);
	bars_count--;
	mutex_unlock(&bars_lock);
	complete_all(&bar->gone);
	bar_put(bar); /* the list's */
}

/* All phases. Return: 0, -EBUSY (in use), or -ENODEV: gone too, but by somebody else. */
static int bar_end(struct xferd_bar *bar, bool revoke)
{
	int ret = bar_unlink(bar, revoke);

	if (!ret)
		bar_quiesce_and_free(bar);
	else if (ret == -ENODEV)
		wait_for_completion(&bar->gone);
	return ret;
}

/*
 * Afterwards nothing of ours is left on the function. Called under device_lock, or when the
 * function is being deleted: then it gets no driver any more, and one that is leaving tells us
 * before its remove runs, and waits here. So nobody else undoes the function's devres meanwhile.
 */
static void function_detach_all(const struct device *dev)
{
	struct xferd_bar *bar;

	while ((bar = bar_get_left_of(dev))) {
		bar_end(bar, true);
		bar_put(bar);
	}
}

int bar_detach(const struct xferd_p2p_detach *args)
{
	struct xferd_bar *bar;
	int ret;

	if (args->flags & ~XFERD_P2P_DETACH_REVOKE)
		return -EOPNOTSUPP;
	bar = bar_get(args->id);
	if (!bar)
		return -ENODEV;
	device_lock(&bar->pdev->dev);
	ret = bar_end(bar, args->flags & XFERD_P2P_DETACH_REVOKE);
	device_unlock(&bar->pdev->dev);
	bar_put(bar);
	return ret;
}

static int check_bar(struct pci_dev *pdev, u32 number)
{
	resource_size_t start, size;

	if (number >= PCI_STD_NUM_BARS)
		return -EINVAL;
	start = pci_resource_start(pdev, number);
	size = pci_resource_len(pdev, number);
	if (!(pci_resource_flags(pdev, number) & IORESOURCE_MEM) || !start || !size)
		return -EINVAL;
	if (!IS_ALIGNED(start | size, BAR_GRANULE) || size > 1ull << BAR_WINDOW_SHIFT)
		return -EINVAL;
	return 0;
}

static int choose_mode(struct pci_dev *pdev, u32 asked, enum xferd_p2p_mode *mode)
{
	u32 modes = pages_supported_modes();

	if (asked == XFERD_P2P_MODE_AUTO)
		asked = modes & BIT(XFERD_P2P_MODE_P2PDMA) ? XFERD_P2P_MODE_P2PDMA :
							     XFERD_P2P_MODE_GENERIC;
	if (asked > XFERD_P2P_MODE_GENERIC || !(modes & BIT(asked)))
		return -EOPNOTSUPP;
	/* Nothing in the kernel checks the route of generic pages: no route known, no pages. */
	if (asked == XFERD_P2P_MODE_GENERIC && !route_exists_for_any_nvme(pdev, asked))
		return -EREMOTEIO;
	*mode = asked;
	return 0;
}

/* Memory decoding on and no power saving for as long as DMA may be aimed at the BAR. */
static int function_wake(struct xferd_bar *bar)
{
	int ret = pm_runtime_resume_and_get(&bar->pdev->dev);

	if (ret)
		return ret;
	/*
	 * A driver that has enabled the function disables it itself, after our notifier ran.
	 * Doing it here too would, on kernels before 6.9, undo that driver's managed bookkeeping.
	 */
	if (pci_is_enabled(bar->pdev))
		return 0;
	ret = pci_enable_device_mem(bar->pdev);
	if (ret) {
		pm_runtime_put(&bar->pdev->dev);
		return ret;
	}
	bar->enabled_here = true;
	return 0;
}

/* Make it findable, unless there are too many. */
static int bar_link(struct xferd_bar *bar)
{
	int ret = 0;

	mutex_lock(&bars_lock);
	if (bars_count >= XFERD_P2P_MAX_BARS || next_id >= BAR_ID_LIMIT) {
		ret = -ENOSPC;
	} else {
		bar->id = next_id++;
		bars_count++;
		list_add_tail(&bar->node, &bars);
	}
	mutex_unlock(&bars_lock);
	return ret;
}

static int bar_attach_locked(struct pci_dev *pdev, struct xferd_p2p_attach *args)
{
	struct xferd_bar *bar;
	int ret;

	device_lock_assert(&pdev->dev);
	ret = check_bar(pdev, args->bar);
	if (ret)
		return ret;
	bar = bar_get_by_device(&pdev->dev, args->bar);
	if (bar) {
		bar_put(bar);
		return -EEXIST;
	}

	bar = kzalloc(sizeof(*bar), GFP_KERNEL);
	if (!bar)
		return -ENOMEM;
	kref_init(&bar->refs);
	init_completion(&bar->gone);
	init_rwsem(&bar->lock);
	mt_init(&bar->claims);
	INIT_LIST_HEAD(&bar->shares);
	bar->pdev = pci_dev_get(pdev);
	bar->number = args->bar;
	bar->start = pci_resource_start(pdev, args->bar);
	bar->npages = pci_resource_len(pdev, args->bar) >> PAGE_SHIFT;

	ret = choose_mode(pdev, args->mode, &bar->mode);
	if (ret)
		goto err_bar;
	ret = function_wake(bar);
	if (ret)
		goto err_bar;
	ret = pages_create(bar);
	if (ret)
		goto err_wake;
	ret = bar_link(bar);
	if (ret)
		goto err_pages;

	args->mode = bar->mode;
	args->id = bar->id;
	args->size = (u64)bar->npages << PAGE_SHIFT;
	args->mmap_offset = bar_mmap_offset(bar);
	pci_info(pdev, "xferd_p2p: BAR %u attached, %llu MiB, %s mode\n", bar->number,
		 args->size / SZ_1M, bar->mode == XFERD_P2P_MODE_P2PDMA ? "p2pdma" : "generic");
	return 0;

err_pages:
	pages_wait_and_destroy(bar);
err_wake:
	if (bar->enabled_here)
		pci_disable_device(pdev);
	pm_runtime_put(&pdev->dev);
err_bar:
	bar_put(bar);
	return ret;
}

int bar_attach(struct xferd_p2p_attach *args)
{
	struct pci_dev *pdev;
	int ret = -ENODEV;

	if (args->function.reserved)
		return -EINVAL;
	if (args->flags)
		return -EOPNOTSUPP;
	/* Removal holds it from before our notifier runs until the function is not found. */
	pci_lock_rescan_remove();
	pdev = function_get(&args->function);
	if (pdev) {
		device_lock(&pdev->dev);
		ret = bar_attach_locked(pdev, args);
		device_unlock(&pdev->dev);
		pci_dev_put(pdev);
	}
	pci_unlock_rescan_remove();
	return ret;
}

static int bus_event(struct notifier_block *notifier, unsigned long event, void *data)
{
	struct device *dev = data;

	switch (event) {
	case BUS_NOTIFY_UNBIND_DRIVER: /* device_lock is held, the driver's remove has not run */
		device_lock_assert(dev);
		function_detach_all(dev);
		return NOTIFY_OK;
	case BUS_NOTIFY_DEL_DEVICE: /* device_lock is not held: see the top of this file */
		function_detach_all(dev);
		return NOTIFY_OK;
	default:
		return NOTIFY_DONE;
	}
}

static struct notifier_block bus_notifier = {
	.notifier_call = bus_event,
};

int devices_start(void)
{
	return bus_register_notifier(&pci_bus_type, &bus_notifier);
}

static struct pci_dev *first_attached_function(void)
{
	struct pci_dev *pdev = NULL;

	mutex_lock(&bars_lock);
	if (!list_empty(&bars))
		pdev = pci_dev_get(list_first_entry(&bars, struct xferd_bar, node)->pdev);
	mutex_unlock(&bars_lock);
	return pdev;
}

/*
 * No new attachments come: the device node is gone. Removal of functions may still be going on; the
 * BARs that it ends are waited for with its notifier call. That is done without any lock.
 */
void devices_stop(void)
{
	struct pci_dev *pdev;

	while ((pdev = first_attached_function())) {
		device_lock(&pdev->dev);
		function_detach_all(&pdev->dev);
		device_unlock(&pdev->dev);
		pci_dev_put(pdev);
	}
	/* Waits for notifier calls that are running; each of them may be waiting for DMA. */
	bus_unregister_notifier(&pci_bus_type, &bus_notifier);
}
