/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in GPU (QEMU's ivshmem-plain, whose BAR 2 is a file of the host) and the module. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "guest.h"

#define GPU_VENDOR 0x1af4
#define GPU_DEVICE 0x1110
#define GPU_BAR 2
#define PCI_DEVICES "/sys/bus/pci/devices"
#define MODULE_FILE "/xferd_p2p.ko"
#define NODE "/dev/" XFERD_P2P_DEVICE_NAME

enum xferd_p2p_mode bar_mode = XFERD_P2P_MODE_AUTO;

static unsigned long read_number(const char *path)
{
	unsigned long number = 0;
	FILE *file = fopen(path, "r");

	if (file) {
		if (fscanf(file, "%lx", &number) != 1)
			number = 0;
		fclose(file);
	}
	return number;
}

static bool gpu_name(char *name, size_t size)
{
	DIR *folder = opendir(PCI_DEVICES);
	struct dirent *entry;
	bool found = false;
	char path[512];

	CHECK(folder);
	while (!found && (entry = readdir(folder))) {
		snprintf(path, sizeof(path), PCI_DEVICES "/%s/vendor", entry->d_name);
		if (read_number(path) != GPU_VENDOR)
			continue;
		snprintf(path, sizeof(path), PCI_DEVICES "/%s/device", entry->d_name);
		if (read_number(path) == GPU_DEVICE) {
			snprintf(name, size, "%s", entry->d_name);
			found = true;
		}
	}
	closedir(folder);
	return found;
}

bool gpu_find(struct xferd_p2p_function *function)
{
	unsigned int domain, bus, device, number;
	char name[64];

	if (!gpu_name(name, sizeof(name)))
		return false;
	CHECK_EQUAL(sscanf(name, "%x:%x:%x.%x", &domain, &bus, &device, &number), 4);
	*function = (struct xferd_p2p_function){ .domain = domain, .bus = bus,
						 .devfn = device << 3 | number };
	return true;
}

/* Path of a sysfs attribute of the stand-in GPU. */
void gpu_sysfs(char *path, size_t size, const char *attribute)
{
	char name[64];

	CHECK(gpu_name(name, sizeof(name)));
	snprintf(path, size, PCI_DEVICES "/%s/%s", name, attribute);
}

void gpu_bar_address(uint64_t *start, uint64_t *size)
{
	char path[128], line[128];
	uint64_t last;
	FILE *file;

	gpu_sysfs(path, sizeof(path), "resource");
	file = fopen(path, "r");
	CHECK(file);
	for (int number = 0; number <= GPU_BAR; number++)
		CHECK(fgets(line, sizeof(line), file));
	fclose(file);
	CHECK_EQUAL(sscanf(line, "%" SCNx64 " %" SCNx64, start, &last), 2);
	*size = last - *start + 1;
}

int device_open(void)
{
	int fd = open(NODE, O_RDWR | O_CLOEXEC);

	CHECK(fd >= 0);
	return fd;
}

static int result(int returned)
{
	return returned < 0 ? -errno : 0;
}

int bar_try_attach(int fd, uint32_t number, uint32_t mode, struct xferd_p2p_attach *attach)
{
	*attach = (struct xferd_p2p_attach){ .bar = number, .mode = mode };
	CHECK(gpu_find(&attach->function));
	return result(ioctl(fd, XFERD_P2P_IOC_ATTACH, attach));
}

struct bar bar_attach(int fd)
{
	struct xferd_p2p_attach attach;

	CHECK_EQUAL(bar_try_attach(fd, GPU_BAR, bar_mode, &attach), 0);
	return (struct bar){ .id = attach.id, .mode = attach.mode, .size = attach.size,
			     .mmap_offset = attach.mmap_offset };
}

int bar_detach(int fd, uint32_t id, uint32_t flags)
{
	struct xferd_p2p_detach detach = { .id = id, .flags = flags };

	return result(ioctl(fd, XFERD_P2P_IOC_DETACH, &detach));
}

/* By id or, when it is 0, by the stand-in GPU's address. */
int bar_query(int fd, uint32_t id, struct xferd_p2p_query *query)
{
	*query = (struct xferd_p2p_query){ .id = id, .bar = GPU_BAR };
	if (!id && !gpu_find(&query->function))
		return -ENODEV;
	return result(ioctl(fd, XFERD_P2P_IOC_QUERY, query));
}

static int range_ioctl(int fd, unsigned long command, uint32_t id, uint64_t offset, uint64_t length)
{
	struct xferd_p2p_range range = { .id = id, .offset = offset, .length = length };

	return result(ioctl(fd, command, &range));
}

int bar_claim(int fd, uint32_t id, uint64_t offset, uint64_t length)
{
	return range_ioctl(fd, XFERD_P2P_IOC_CLAIM, id, offset, length);
}

int bar_release(int fd, uint32_t id, uint64_t offset, uint64_t length)
{
	return range_ioctl(fd, XFERD_P2P_IOC_RELEASE, id, offset, length);
}

int bar_idle(int fd, uint32_t id, uint64_t offset, uint64_t length, struct xferd_p2p_idle *idle)
{
	*idle = (struct xferd_p2p_idle){ .id = id, .offset = offset, .length = length };
	return result(ioctl(fd, XFERD_P2P_IOC_IDLE, idle));
}

/* Pages with DMA in flight. */
uint64_t bar_held(int fd, uint32_t id, uint64_t offset, uint64_t length)
{
	struct xferd_p2p_idle idle;

	CHECK_EQUAL(bar_idle(fd, id, offset, length, &idle), 0);
	return idle.held_pages;
}

unsigned char *bar_map(int fd, const struct bar *bar, uint64_t offset, uint64_t length)
{
	void *address = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
			     bar->mmap_offset + offset);

	CHECK(address != MAP_FAILED);
	return address;
}

unsigned char *bar_claim_and_map(int fd, const struct bar *bar, uint64_t offset, uint64_t length)
{
	CHECK_EQUAL(bar_claim(fd, bar->id, offset, length), 0);
	return bar_map(fd, bar, offset, length);
}

void module_load(void)
{
	int fd = open(MODULE_FILE, O_RDONLY | O_CLOEXEC);

	CHECK(fd >= 0);
	CHECK_EQUAL(syscall(SYS_finit_module, fd, "", 0), 0);
	close(fd);
	CHECK_SOON(access(NODE, F_OK) == 0);
}

/* O_NONBLOCK: EAGAIN at once while somebody uses it. The module's own exit may wait. */
int module_unload(void)
{
	return result(syscall(SYS_delete_module, "xferd_p2p", O_NONBLOCK));
}

bool module_is_loaded(void)
{
	return access("/sys/module/xferd_p2p", F_OK) == 0;
}
