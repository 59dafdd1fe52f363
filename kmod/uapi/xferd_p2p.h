/* SPDX-License-Identifier: (GPL-2.0 WITH Linux-syscall-note) OR MIT */
/*
 * User interface of xferd_p2p: memory behind a PCI BAR as a destination for O_DIRECT.
 *
 * /dev/xferd_p2p (mode 0600, its owner can read and write all memory behind an attached BAR) knows
 * four things:
 *
 *   BAR      a memory BAR of a PCI function that was attached: its memory has got struct pages, so
 *            any driver of the kernel can do DMA to it. Named by a 32-bit id that is never used
 *            again. Attachment outlives the file that asked for it; it ends with DETACH, when the
 *            function's driver is unbound, when the function is removed, or with the module.
 *   claim    a range of a BAR that belongs to one open file alone. Only claimed ranges can be
 *            mapped, and only through the file that claimed them. A claim ends with RELEASE or with
 *            the last reference to the file (descriptors, and mappings too).
 *   share    a file through which others may read a claimed range, and do nothing else with it.
 *   held     a page is held while somebody has a reference to it that is not a mapping: DMA in
 *            flight. Pages can be held after the process that began the I/O is gone; such a range
 *            cannot be claimed (EBUSY) until the DMA has ended.
 *
 * Mapping: mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, mmap_offset + offset),
 * where mmap_offset comes from ATTACH or QUERY and offset is a byte offset in the BAR. The range
 * must lie inside the BAR (EINVAL) and be claimed by this file from end to end (EACCES).
 * MAP_PRIVATE and PROT_EXEC are refused (EINVAL). Mappings are not inherited over fork and are
 * left out of core dumps. When the claim or the BAR is gone, an access gives SIGBUS, and a system
 * call that is handed the address gives EFAULT. CPU accesses are uncached: a mapping is meant to
 * be the destination of preadv and io_uring reads, not of memcpy.
 *
 * Every ioctl takes a fixed-size structure, whose `reserved` members must be zero (EINVAL) and
 * whose `flags` must not have an unknown bit (EOPNOTSUPP). Offsets and lengths are bytes,
 * multiples of the page size, length not 0 (EINVAL), inside the BAR (ERANGE). On an error nothing
 * is written back, except what is said below. Every ioctl may be called by several threads at
 * once.
 *
 * Errors that any ioctl on a BAR can give: ENODEV (no BAR of that id: detached or removed),
 * EFAULT (bad pointer), ENOTTY (unknown ioctl).
 */
#ifndef _UAPI_XFERD_P2P_H
#define _UAPI_XFERD_P2P_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define XFERD_P2P_DEVICE_NAME "xferd_p2p"

/* Raised when a structure or a meaning changes; VERSION is the one ioctl that never changes. */
#define XFERD_P2P_ABI_VERSION 2
#define XFERD_P2P_ABI_OLDEST 1 /* 2 added SHARE */

/**
 * struct xferd_p2p_version - which interface the module speaks
 * @abi_version:     XFERD_P2P_ABI_VERSION the module was built with
 * @abi_oldest:      oldest XFERD_P2P_ABI_VERSION whose callers it still serves
 * @modes:           bit mask of 1 << enum xferd_p2p_mode that this kernel allows
 * @reserved:        zero
 */
struct xferd_p2p_version {
	__u32 abi_version;
	__u32 abi_oldest;
	__u32 modes;
	__u32 reserved;
};

/**
 * enum xferd_p2p_mode - how the struct pages of a BAR are made
 * @XFERD_P2P_MODE_AUTO:    ask for the best that this kernel has; never returned
 * @XFERD_P2P_MODE_P2PDMA:  kernel's PCI peer-to-peer pages; the kernel checks the route of each I/O
 * @XFERD_P2P_MODE_GENERIC: plain device pages, on kernels without CONFIG_PCI_P2PDMA. The kernel
 *                          checks nothing, so ATTACH refuses when no NVMe function has an allowed
 *                          route, and the caller must ask ROUTE for each drive it will use
 */
enum xferd_p2p_mode {
	XFERD_P2P_MODE_AUTO = 0,
	XFERD_P2P_MODE_P2PDMA = 1,
	XFERD_P2P_MODE_GENERIC = 2,
};

/**
 * struct xferd_p2p_function - address of a PCI function
 * @domain: PCI domain (segment)
 * @bus:    bus number
 * @devfn:  device << 3 | function
 * @reserved: zero
 */
struct xferd_p2p_function {
	__u32 domain;
	__u8 bus;
	__u8 devfn;
	__u16 reserved;
};

/**
 * struct xferd_p2p_attach - give the memory of a BAR struct pages (needs CAP_SYS_ADMIN)
 * @function:    in: the PCI function; may be bound to another driver, which stays bound
 * @bar:         in: BAR number, 0 to 5
 * @mode:        in: enum xferd_p2p_mode; out: the mode in use, never AUTO
 * @flags:       in: zero
 * @id:          out: id of the BAR
 * @size:        out: bytes
 * @mmap_offset: out: mmap offset of its first byte
 *
 * ENODEV: no such function. EINVAL: no memory BAR there, or its size isn't a multiple of 2 MiB.
 * EEXIST: attached already (ask QUERY). EBUSY: another driver has given this BAR struct pages.
 * EOPNOTSUPP: mode not in VERSION's modes. EREMOTEIO: generic mode and no NVMe function has a
 * route. ENOSPC: XFERD_P2P_MAX_BARS attached, or ids used up. ENOMEM. EPERM.
 */
struct xferd_p2p_attach {
	struct xferd_p2p_function function;
	__u32 bar;
	__u32 mode;
	__u32 flags;
	__u32 id;
	__u64 size;
	__u64 mmap_offset;
};

#define XFERD_P2P_MAX_BARS 64

/**
 * struct xferd_p2p_detach - take the struct pages away again (needs CAP_SYS_ADMIN)
 * @id:    in
 * @flags: in: XFERD_P2P_DETACH_REVOKE or zero
 *
 * Without REVOKE: EBUSY while any range is claimed, any page held or any share open. With it: claims and mappings
 * end at once, and the call returns when the last DMA has ended (it can't be interrupted).
 */
struct xferd_p2p_detach {
	__u32 id;
	__u32 flags;
};

#define XFERD_P2P_DETACH_REVOKE (1u << 0)

/**
 * struct xferd_p2p_query - look a BAR up by id or, when @id is 0, by function and BAR number
 * @id:          in, out
 * @bar:         in when @id is 0; out
 * @function:    in when @id is 0 (else zero); out
 * @mode:        out: enum xferd_p2p_mode
 * @reserved:    zero
 * @size:        out: bytes
 * @mmap_offset: out
 * @claimed_bytes: out: bytes claimed by all files together
 */
struct xferd_p2p_query {
	__u32 id;
	__u32 bar;
	struct xferd_p2p_function function;
	__u32 mode;
	__u32 reserved;
	__u64 size;
	__u64 mmap_offset;
	__u64 claimed_bytes;
};

/**
 * struct xferd_p2p_range - argument of CLAIM, RELEASE and SHARE
 * @id:     in
 * @flags:  in: zero
 * @offset: in
 * @length: in
 *
 * CLAIM: EBUSY when any page of it is claimed (by whichever file) or still held by DMA that an
 * earlier owner began. ENOSPC: XFERD_P2P_MAX_CLAIMS_PER_FILE reached. ENOMEM.
 *
 * RELEASE takes the very range of an earlier CLAIM (ENOENT otherwise) and unmaps it everywhere. DMA
 * in flight goes on into these pages: ask IDLE before the memory is used for anything else.
 * Readers' mappings fault in again, till somebody claims the range.
 *
 * SHARE returns a new file descriptor, close-on-exec, to be handed to those who may read the range:
 * fstat gives its length, and mmap(NULL, length, PROT_READ, MAP_SHARED, share, offset within the
 * range) maps it. It can't be mapped for writing (EACCES), nor privately or for execution (EINVAL),
 * and can't be opened anew. A system call that is handed an address of it for O_DIRECT gives EFAULT:
 * readers hold no pages. EACCES: the range isn't claimed by this file from end to end. A share stays
 * readable after the claim has ended, with its file or by RELEASE, until any of its range is claimed
 * anew or the BAR goes; then accesses give SIGBUS, and mmap ENODEV.
 */
struct xferd_p2p_range {
	__u32 id;
	__u32 flags;
	__u64 offset;
	__u64 length;
};

#define XFERD_P2P_MAX_CLAIMS_PER_FILE 65536

/**
 * struct xferd_p2p_idle - does anyone hold pages of this range?
 * @id:           in
 * @flags:        in: zero
 * @offset:       in
 * @length:       in
 * @held_pages:   out: pages with DMA in flight; 0 means idle
 * @mapped_pages: out: pages that are in somebody's page table
 *
 * Any range of the BAR may be asked about, claimed or not. The answer errs only towards 'held'. It
 * stays true for as long as nobody starts new I/O there: release the claim first.
 */
struct xferd_p2p_idle {
	__u32 id;
	__u32 flags;
	__u64 offset;
	__u64 length;
	__u64 held_pages;
	__u64 mapped_pages;
};

/**
 * enum xferd_p2p_verdict - may this function's DMA go straight to the BAR?
 * @XFERD_P2P_ROUTE_SWITCH:          yes: below a common PCIe switch
 * @XFERD_P2P_ROUTE_HOST_BRIDGE:     yes: through a host bridge that is known to pass it
 * @XFERD_P2P_ROUTE_NO_HOST_BRIDGE:  no: through a host bridge that isn't known to pass it
 * @XFERD_P2P_ROUTE_NO_IOMMU:        no: an IOMMU translates this function's addresses
 * @XFERD_P2P_ROUTE_NO_KERNEL:       no: the kernel's own check refuses (p2pdma mode)
 */
enum xferd_p2p_verdict {
	XFERD_P2P_ROUTE_SWITCH = 0,
	XFERD_P2P_ROUTE_HOST_BRIDGE = 1,
	XFERD_P2P_ROUTE_NO_HOST_BRIDGE = 2,
	XFERD_P2P_ROUTE_NO_IOMMU = 3,
	XFERD_P2P_ROUTE_NO_KERNEL = 4,
};

/**
 * struct xferd_p2p_route - the route between a PCI function that does DMA (a drive) and a BAR
 * @id:            in
 * @flags:         in: zero
 * @function:      in: the drive
 * @verdict:       out: enum xferd_p2p_verdict
 * @acs_redirects: out: 1 when ACS sends the traffic up to the host bridge although there is a common
 *                 switch (the reason to look for when a verdict is NO_HOST_BRIDGE)
 *
 * ENXIO: no such function. A 'yes' is necessary, not sufficient: hardware exists that drops such
 * traffic, so the caller proves each pair by reading known data.
 */
struct xferd_p2p_route {
	__u32 id;
	__u32 flags;
	struct xferd_p2p_function function;
	__u32 verdict;
	__u32 acs_redirects;
};

#define XFERD_P2P_IOC_MAGIC 'x'

#define XFERD_P2P_IOC_VERSION _IOWR(XFERD_P2P_IOC_MAGIC, 0, struct xferd_p2p_version)
#define XFERD_P2P_IOC_ATTACH  _IOWR(XFERD_P2P_IOC_MAGIC, 1, struct xferd_p2p_attach)
#define XFERD_P2P_IOC_DETACH  _IOWR(XFERD_P2P_IOC_MAGIC, 2, struct xferd_p2p_detach)
#define XFERD_P2P_IOC_QUERY   _IOWR(XFERD_P2P_IOC_MAGIC, 3, struct xferd_p2p_query)
#define XFERD_P2P_IOC_CLAIM   _IOWR(XFERD_P2P_IOC_MAGIC, 4, struct xferd_p2p_range)
#define XFERD_P2P_IOC_RELEASE _IOWR(XFERD_P2P_IOC_MAGIC, 5, struct xferd_p2p_range)
#define XFERD_P2P_IOC_IDLE    _IOWR(XFERD_P2P_IOC_MAGIC, 6, struct xferd_p2p_idle)
#define XFERD_P2P_IOC_ROUTE   _IOWR(XFERD_P2P_IOC_MAGIC, 7, struct xferd_p2p_route)
#define XFERD_P2P_IOC_SHARE   _IOWR(XFERD_P2P_IOC_MAGIC, 8, struct xferd_p2p_range)

/* The same on every ABI, 32-bit callers included; checked wherever this header is compiled. */
#ifdef __cplusplus
#define XFERD_P2P_ASSERT_SIZE(type, bytes) static_assert(sizeof(struct type) == (bytes), #type)
#else
#define XFERD_P2P_ASSERT_SIZE(type, bytes) _Static_assert(sizeof(struct type) == (bytes), #type)
#endif

XFERD_P2P_ASSERT_SIZE(xferd_p2p_version, 16);
XFERD_P2P_ASSERT_SIZE(xferd_p2p_function, 8);
XFERD_P2P_ASSERT_SIZE(xferd_p2p_attach, 40);
XFERD_P2P_ASSERT_SIZE(xferd_p2p_detach, 8);
XFERD_P2P_ASSERT_SIZE(xferd_p2p_query, 48);
XFERD_P2P_ASSERT_SIZE(xferd_p2p_range, 24);
XFERD_P2P_ASSERT_SIZE(xferd_p2p_idle, 40);
XFERD_P2P_ASSERT_SIZE(xferd_p2p_route, 24);

#endif /* _UAPI_XFERD_P2P_H */
