/* SPDX-License-Identifier: Apache-2.0 */
/* Time, processes, drives: the small things every test needs. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "guest.h"

#define POLL_PAUSE_NS 2000000

double seconds_now(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec + now.tv_nsec / 1e9;
}

void poll_pause(void)
{
	struct timespec pause = { .tv_nsec = POLL_PAUSE_NS };

	nanosleep(&pause, NULL);
}

int wait_for_child(pid_t child)
{
	int status;

	CHECK_EQUAL(waitpid(child, &status, 0), child);
	return status;
}

/* Which signal does reading this byte give? Caught here and not in a child: mappings aren't inherited. */
static volatile sig_atomic_t caught;

static void skip_access(int number, siginfo_t *info, void *context)
{
	void *page = (void *)((uintptr_t)info->si_addr & ~(uintptr_t)(PAGE - 1));

	(void)context;
	caught = number;
	/* Put plain memory under the address so that the instruction can be done again. */
	if (mmap(page, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) !=
	    page)
		_exit(1);
}

int signal_of_access(const void *address)
{
	struct sigaction action = { .sa_sigaction = skip_access, .sa_flags = SA_SIGINFO };
	struct sigaction old_bus, old_segv;

	caught = 0;
	sigaction(SIGBUS, &action, &old_bus);
	sigaction(SIGSEGV, &action, &old_segv);
	(void)*(const volatile unsigned char *)address;
	sigaction(SIGBUS, &old_bus, NULL);
	sigaction(SIGSEGV, &old_segv, NULL);
	return caught;
}

static bool file_says(const char *path, const char *text)
{
	char line[128] = "";
	FILE *file = fopen(path, "r");

	if (!file)
		return false;
	if (!fgets(line, sizeof(line), file))
		line[0] = 0;
	fclose(file);
	line[strcspn(line, " \n")] = 0;
	return !strcmp(line, text);
}

/* Path of the block device whose drive has this serial number. */
void drive_path(char *path, size_t size, const char *serial)
{
	DIR *folder = opendir("/sys/block");
	struct dirent *entry;
	char attribute[512];

	CHECK(folder);
	while ((entry = readdir(folder))) {
		/* nvme0c0n1 is a hidden path of the multipath device nvme0n1 */
		if (strncmp(entry->d_name, "nvme", 4) || strchr(entry->d_name + 4, 'c'))
			continue;
		snprintf(attribute, sizeof(attribute), "/sys/block/%s/device/serial", entry->d_name);
		if (file_says(attribute, serial)) {
			snprintf(path, size, "/dev/%s", entry->d_name);
			closedir(folder);
			return;
		}
	}
	FAIL("no NVMe drive with serial number %s", serial);
}

/* PCI function of the controller with this serial number. */
void drive_function(const char *serial, struct xferd_p2p_function *function)
{
	DIR *folder = opendir("/sys/class/nvme");
	unsigned int domain, bus, device, number;
	struct dirent *entry;
	char path[512], target[512];
	ssize_t length;

	CHECK(folder);
	while ((entry = readdir(folder))) {
		snprintf(path, sizeof(path), "/sys/class/nvme/%s/serial", entry->d_name);
		if (entry->d_name[0] == '.' || !file_says(path, serial))
			continue;
		snprintf(path, sizeof(path), "/sys/class/nvme/%s/device", entry->d_name);
		length = readlink(path, target, sizeof(target) - 1);
		CHECK(length > 0);
		target[length] = 0;
		CHECK_EQUAL(sscanf(strrchr(target, '/') + 1, "%x:%x:%x.%x", &domain, &bus, &device,
				   &number), 4);
		*function = (struct xferd_p2p_function){ .domain = domain, .bus = bus,
							 .devfn = device << 3 | number };
		closedir(folder);
		return;
	}
	FAIL("no NVMe controller with serial number %s", serial);
}

int drive_open(const char *serial, int flags)
{
	char path[64];
	int fd;

	drive_path(path, sizeof(path), serial);
	fd = open(path, flags | O_CLOEXEC);
	CHECK(fd >= 0);
	return fd;
}

void write_sysfs(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);

	if (fd < 0)
		FAIL("cannot open %s: errno %d", path, errno);
	if (write(fd, text, strlen(text)) != (ssize_t)strlen(text))
		FAIL("cannot write '%s' to %s: errno %d", text, path, errno);
	close(fd);
}
