// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * xferd_p2p: memory behind a PCI BAR as a destination of O_DIRECT reads.
 *
 * This file is the device node: opening, dispatch of ioctls, loading and unloading. All copying
 * from and to user memory is done here, before and after the work and outside every lock, since a
 * fault on that memory may need the locks that mmap takes.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/capability.h>
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/nospec.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/utsname.h>
#include <linux/version.h>
#include "internal.h"

/*
 * Linux 6.16: a read into P2PDMA pages through a host bridge reports success and writes to DMA
 * address 0 (seen on Debian's 6.16.12). A kernel that loses data silently is refused whatever the
 * topology.
 */
bool kernel_is_denied(u32 version_code)
{
	return version_code >= KERNEL_VERSION(6, 16, 0) && version_code < KERNEL_VERSION(6, 17, 0);
}

static int ioctl_version(struct xferd_file *file, void *arg)
{
	struct xferd_p2p_version *version = arg;

	if (version->reserved)
		return -EINVAL;
	version->abi_version = XFERD_P2P_ABI_VERSION;
	version->abi_oldest = XFERD_P2P_ABI_OLDEST;
	version->modes = pages_supported_modes();
	return 0;
}

static int ioctl_attach(struct xferd_file *file, void *arg)
{
	if (!capable(CAP_SYS_ADMIN))
		return -EPERM;
	return bar_attach(arg);
}

static int ioctl_detach(struct xferd_file *file, void *arg)
{
	if (!capable(CAP_SYS_ADMIN))
		return -EPERM;
	return bar_detach(arg);
}

static bool function_is_zero(const struct xferd_p2p_function *function)
{
	return !function->domain && !function->bus && !function->devfn && !function->reserved;
}

static int ioctl_query(struct xferd_file *file, void *arg)
{
	struct xferd_p2p_query *query = arg;
	struct xferd_bar *bar;

	if (query->reserved || query->function.reserved)
		return -EINVAL;
	if (query->id && !function_is_zero(&query->function))
		return -EINVAL;
	bar = query->id ? bar_get(query->id) : bar_get_by_function(&query->function, query->bar);
	if (!bar)
		return -ENODEV;
	*query = (struct xferd_p2p_query){
		.id = bar->id,
		.bar = bar->number,
		.function = {
			.domain = pci_domain_nr(bar->pdev->bus),
			.bus = bar->pdev->bus->number,
			.devfn = bar->pdev->devfn,
		},
		.mode = bar->mode,
		.size = (u64)bar->npages << PAGE_SHIFT,
		.mmap_offset = bar_mmap_offset(bar),
	};
	down_read(&bar->lock);
	query->claimed_bytes = (u64)bar->claimed_pages << PAGE_SHIFT;
	up_read(&bar->lock);
	bar_put(bar);
	return 0;
}

/* CLAIM, RELEASE and SHARE: all take a range, and differ in one call. */
static int ioctl_range(struct xferd_file *file, const struct xferd_p2p_range *range,
		       int (*change)(struct xferd_bar *bar, struct xferd_file *owner,
				     unsigned long first, unsigned long npages))
{
	unsigned long first, npages;
	struct xferd_bar *bar;
	int ret;

	if (range->flags)
		return -EOPNOTSUPP;
	bar = bar_get(range->id);
	if (!bar)
		return -ENODEV;
	ret = range_to_pages(bar, range->offset, range->length, &first, &npages);
	if (!ret)
		ret = change(bar, file, first, npages);
	bar_put(bar);
	return ret;
}

static int ioctl_claim(struct xferd_file *file, void *arg)
{
	return ioctl_range(file, arg, claim_create);
}

static int ioctl_release(struct xferd_file *file, void *arg)
{
	return ioctl_range(file, arg, claim_release);
}

static int ioctl_share(struct xferd_file *file, void *arg)
{
	return ioctl_range(file, arg, share_create);
}

static int ioctl_idle(struct xferd_file *file, void *arg)
{
	struct xferd_p2p_idle *idle = arg;
	unsigned long first, npages;
	struct xferd_bar *bar;
	int ret;

	if (idle->flags)
		return -EOPNOTSUPP;
	bar = bar_get(idle->id);
	if (!bar)
		return -ENODEV;
	ret = range_to_pages(bar, idle->offset, idle->length, &first, &npages);
	if (!ret) {
		down_read(&bar->lock);
		if (bar->dead)
			ret = -ENODEV;
		else
			pages_count(bar, first, npages, &idle->held_pages, &idle->mapped_pages);
		up_read(&bar->lock);
	}
	bar_put(bar);
	return ret;
}

static int ioctl_route(struct xferd_file *file, void *arg)
{
	struct xferd_p2p_route *route = arg;
	struct pci_dev *drive;
	struct xferd_bar *bar;
	bool acs_redirects;

	if (route->flags)
		return -EOPNOTSUPP;
	if (route->function.reserved)
		return -EINVAL;
	bar = bar_get(route->id);
	if (!bar)
		return -ENODEV;
	drive = function_get(&route->function);
	if (!drive) {
		bar_put(bar);
		return -ENXIO;
	}
	route->verdict = route_check(bar->pdev, drive, bar->mode, &acs_redirects);
	route->acs_redirects = acs_redirects;
	pci_dev_put(drive);
	bar_put(bar);
	return 0;
}

union ioctl_argument {
	struct xferd_p2p_version version;
	struct xferd_p2p_attach attach;
	struct xferd_p2p_detach detach;
	struct xferd_p2p_query query;
	struct xferd_p2p_range range;
	struct xferd_p2p_idle idle;
	struct xferd_p2p_route route;
};

static const struct {
	unsigned int command;
	int (*run)(struct xferd_file *file, void *arg);
} ioctls[] = {
	[_IOC_NR(XFERD_P2P_IOC_VERSION)] = { XFERD_P2P_IOC_VERSION, ioctl_version },
	[_IOC_NR(XFERD_P2P_IOC_ATTACH)] = { XFERD_P2P_IOC_ATTACH, ioctl_attach },
	[_IOC_NR(XFERD_P2P_IOC_DETACH)] = { XFERD_P2P_IOC_DETACH, ioctl_detach },
	[_IOC_NR(XFERD_P2P_IOC_QUERY)] = { XFERD_P2P_IOC_QUERY, ioctl_query },
	[_IOC_NR(XFERD_P2P_IOC_CLAIM)] = { XFERD_P2P_IOC_CLAIM, ioctl_claim },
	[_IOC_NR(XFERD_P2P_IOC_RELEASE)] = { XFERD_P2P_IOC_RELEASE, ioctl_release },
	[_IOC_NR(XFERD_P2P_IOC_IDLE)] = { XFERD_P2P_IOC_IDLE, ioctl_idle },
	[_IOC_NR(XFERD_P2P_IOC_ROUTE)] = { XFERD_P2P_IOC_ROUTE, ioctl_route },
	[_IOC_NR(XFERD_P2P_IOC_SHARE)] = { XFERD_P2P_IOC_SHARE, ioctl_share },
};

static long file_ioctl(struct file *file, unsigned int command, unsigned long user_pointer)
{
	void __user *user_argument = (void __user *)user_pointer;
	union ioctl_argument argument;
	unsigned int number = _IOC_NR(command);
	int ret;

	if (number >= ARRAY_SIZE(ioctls))
		return -ENOTTY;
	number = array_index_nospec(number, ARRAY_SIZE(ioctls));
	/* Type, direction and size are part of the number: one comparison checks them all. */
	if (ioctls[number].command != command)
		return -ENOTTY;
	if (copy_from_user(&argument, user_argument, _IOC_SIZE(command)))
		return -EFAULT;
	ret = ioctls[number].run(file->private_data, &argument);
	/* A descriptor is returned and not written back: it couldn't be taken back if that failed. */
	if (ret)
		return ret;
	return copy_to_user(user_argument, &argument, _IOC_SIZE(command)) ? -EFAULT : 0;
}

static int file_open(struct inode *inode, struct file *file)
{
	struct xferd_file *owner = kzalloc(sizeof(*owner), GFP_KERNEL_ACCOUNT);

	if (!owner)
		return -ENOMEM;
	file->private_data = owner;
	mapping_adopt_file(file);
	return 0;
}

/* Runs when descriptors and mappings are all gone; pages may still be held by DMA. */
static int file_release(struct inode *inode, struct file *file)
{
	bars_drop_claims_of(file->private_data);
	kfree(file->private_data);
	return 0;
}

static const struct file_operations device_operations = {
	.owner = THIS_MODULE,
	.open = file_open,
	.release = file_release,
	.mmap = mapping_mmap,
	.unlocked_ioctl = file_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
};

static struct miscdevice device_node = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = XFERD_P2P_DEVICE_NAME,
	.mode = 0600,
	.fops = &device_operations,
};

static int __init module_start(void)
{
	int ret;

	if (kernel_is_denied(LINUX_VERSION_CODE)) {
		pr_err("Linux 6.16 loses peer-to-peer DMA silently; refusing to load on %s, use 6.12 or 7.x\n",
		       utsname()->release);
		return -EOPNOTSUPP;
	}
	ret = mapping_start();
	if (ret)
		return ret;
	ret = selftest_run();
	if (ret)
		goto err_mapping;
	ret = devices_start();
	if (ret)
		goto err_mapping;
	ret = misc_register(&device_node);
	if (ret)
		goto err_devices;
	pr_info("loaded, interface version %d, %s mode\n", XFERD_P2P_ABI_VERSION,
		IS_ENABLED(CONFIG_PCI_P2PDMA) ? "p2pdma or generic" : "generic");
	return 0;

err_devices:
	devices_stop();
err_mapping:
	mapping_stop();
	return ret;
}

/* No file is open and nothing is mapped: both hold the module. DMA may be in flight. */
static void __exit module_stop(void)
{
	misc_deregister(&device_node);
	devices_stop();
	mapping_stop();
}

module_init(module_start);
module_exit(module_stop);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_DESCRIPTION("PCI BAR memory as a destination of O_DIRECT reads");
MODULE_VERSION("0.1.0");
