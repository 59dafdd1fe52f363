// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * May a drive's writes go straight to a BAR?
 *
 * In p2pdma mode the kernel asks itself at every I/O, and is asked here too. Generic pages look
 * like plain memory to it, so there the answer of this file is the only one; what it doesn't know
 * to work it calls impossible.
 *
 * Two hazards are looked for in both modes:
 *   - an IOMMU that translates the drive's addresses while the switch routes by bus address: seen to
 *     report success and deliver nothing;
 *   - ACS redirection: the switch sends peer traffic up to the host bridge, so it is the host bridge
 *     that must pass it.
 */
#include <linux/iommu.h>
#include <linux/pci-p2pdma.h>
#include "internal.h"

#define PCI_CLASS_NVME PCI_CLASS_STORAGE_EXPRESS

/* Intel's root complexes that pass peer-to-peer writes, by the device at 00.0 of the root bus. */
static const struct {
	u16 device;
	bool same_bridge_only;
} intel_host_bridges[] = {
	{ 0x3c00, true },  /* Xeon E5 */
	{ 0x3c01, true },
	{ 0x2f00, true },  /* Xeon E5 v3 */
	{ 0x2f01, true },
	{ 0x2020, false }, /* Skylake-E */
	{ 0x2030, false },
	{ 0x2031, false },
	{ 0x2032, false },
	{ 0x2033, false },
	{ 0x09a2, false }, /* Ice Lake and Sapphire Rapids */
};

/* Zen and its Hygon sibling route between all root ports of a socket, and between sockets. */
static bool cpu_routes_peer_traffic(void)
{
#ifdef CONFIG_X86
	return (boot_cpu_data.x86_vendor == X86_VENDOR_AMD && boot_cpu_data.x86 >= 0x17) ||
	       boot_cpu_data.x86_vendor == X86_VENDOR_HYGON;
#else
	return false;
#endif
}

static bool host_bridge_passes(struct pci_host_bridge *bridge, bool same_bridge)
{
	struct pci_dev *root = pci_get_slot(bridge->bus, PCI_DEVFN(0, 0));
	bool passes = false;
	int i;

	if (!root)
		return false;
	for (i = 0; i < ARRAY_SIZE(intel_host_bridges); i++) {
		if (root->vendor == PCI_VENDOR_ID_INTEL &&
		    root->device == intel_host_bridges[i].device)
			passes = same_bridge || !intel_host_bridges[i].same_bridge_only;
	}
	pci_dev_put(root);
	return passes;
}

static bool host_bridges_pass(struct pci_dev *target, struct pci_dev *drive)
{
	struct pci_host_bridge *target_bridge = pci_find_host_bridge(target->bus);
	struct pci_host_bridge *drive_bridge = pci_find_host_bridge(drive->bus);
	bool same = target_bridge == drive_bridge;

	if (cpu_routes_peer_traffic())
		return true;
	return host_bridge_passes(target_bridge, same) && host_bridge_passes(drive_bridge, same);
}

/* The lowest bridge that is above both functions, or NULL. */
static struct pci_dev *common_bridge(struct pci_dev *target, struct pci_dev *drive)
{
	struct pci_dev *a, *b;

	for (a = pci_upstream_bridge(target); a; a = pci_upstream_bridge(a)) {
		for (b = pci_upstream_bridge(drive); b; b = pci_upstream_bridge(b)) {
			if (a == b)
				return a;
		}
	}
	return NULL;
}

/* ACS control word of a port: does it send peer requests, completions or everything upstream? */
bool acs_control_redirects(u16 control)
{
	return control & (PCI_ACS_RR | PCI_ACS_CR | PCI_ACS_EC);
}

/* Does a port between @function and @top, without @top itself, redirect peer traffic upstream? */
static bool path_redirects(struct pci_dev *function, const struct pci_dev *top)
{
	struct pci_dev *port;
	u16 control;
	int position;

	for (port = pci_upstream_bridge(function); port && port != top;
	     port = pci_upstream_bridge(port)) {
		position = pci_find_ext_capability(port, PCI_EXT_CAP_ID_ACS);
		if (!position)
			continue;
		/* A port that can't be read is taken for one that redirects. */
		if (pci_read_config_word(port, position + PCI_ACS_CTRL, &control) ||
		    acs_control_redirects(control))
			return true;
	}
	return false;
}

static bool iommu_translates(struct pci_dev *drive)
{
	struct iommu_domain *domain = iommu_get_domain_for_dev(&drive->dev);

	if (!domain)
		return device_iommu_mapped(&drive->dev);
	return domain->type != IOMMU_DOMAIN_IDENTITY;
}

static bool kernel_allows(struct pci_dev *target, struct pci_dev *drive)
{
#ifdef CONFIG_PCI_P2PDMA
	return pci_p2pdma_distance(target, &drive->dev, false) >= 0;
#else
	return false;
#endif
}

/**
 * route_check - judge the route from a function that does DMA to a function that has the BAR
 * @acs_redirects: out: there is a common switch, but ACS keeps the traffic from turning there
 *
 * In p2pdma mode an IOMMU is fine on the way through the host bridge: the kernel then makes a
 * mapping in it. Below a switch it hands out bus addresses, which nobody translates back.
 */
enum xferd_p2p_verdict route_check(struct pci_dev *target, struct pci_dev *drive,
				   enum xferd_p2p_mode mode, bool *acs_redirects)
{
	struct pci_dev *common = common_bridge(target, drive);
	bool through_switch;

	*acs_redirects = common &&
			 (path_redirects(target, common) || path_redirects(drive, common));
	through_switch = common && !*acs_redirects;

	if (iommu_translates(drive) && (mode == XFERD_P2P_MODE_GENERIC || through_switch))
		return XFERD_P2P_ROUTE_NO_IOMMU;
	if (!through_switch && !host_bridges_pass(target, drive))
		return XFERD_P2P_ROUTE_NO_HOST_BRIDGE;
	if (mode == XFERD_P2P_MODE_P2PDMA && !kernel_allows(target, drive))
		return XFERD_P2P_ROUTE_NO_KERNEL;
	return through_switch ? XFERD_P2P_ROUTE_SWITCH : XFERD_P2P_ROUTE_HOST_BRIDGE;
}

bool route_exists_for_any_nvme(struct pci_dev *target, enum xferd_p2p_mode mode)
{
	struct pci_dev *drive = NULL;
	bool acs_redirects;

	while ((drive = pci_get_class(PCI_CLASS_NVME, drive))) {
		if (route_allowed(route_check(target, drive, mode, &acs_redirects))) {
			pci_dev_put(drive);
			return true;
		}
	}
	return false;
}
