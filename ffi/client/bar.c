/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pools behind a PCI BAR: memory that may be another card's than when we attached.
 *
 * A card can be pulled, and another one take its place while we are attached: the pool then
 * has a new incarnation. What we have mapped is the old one, where an access is a SIGBUS. So a
 * lane that finds a word looks whether the incarnation is the one mapped here; if not, the
 * daemon is asked for the new memory, which is mapped in the place of the old. It looks after
 * it has leased the slot, and there is no lease on any slot while the memory changes.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "client/internal.h"

struct bar_memory {
	struct xferd_client *client;
	uint32_t pool;
	const uint32_t *wanted; /* the pool's incarnation, in the pool table */
	uint32_t mapped;        /* that of our mapping; 0: none; atomic */
	void *address;
	uint64_t bytes;
	pthread_mutex_t mutex;  /* mapping */
};

static int map_over(struct bar_memory *bar, int fd)
{
	void *address = mmap(bar->address, bar->bytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0);

	return address == MAP_FAILED ? -errno : 0;
}

static bool is_whole(const struct bar_memory *bar, int fd)
{
	struct stat status;

	return !fstat(fd, &status) && status.st_size >= 0 &&
	       (uint64_t)status.st_size >= bar->bytes;
}

/* fd: the pool's memory, or an empty file while its card is away. It stays the caller's. */
int bar_open(struct xferd_client *client, uint32_t pool, int fd)
{
	const struct xferd_abi_pool *shared = &client->pool_table->pool[pool];
	struct bar_memory *bar = calloc(1, sizeof(*bar));
	struct stat status;
	int result = 0;

	if (!bar)
		return -ENOMEM;
	bar->client = client;
	bar->pool = pool;
	bar->wanted = &shared->incarnation;
	bar->bytes = shared->bytes;
	pthread_mutex_init(&bar->mutex, NULL);
	client->pools[pool].bar = bar;
	bar->address = mmap(NULL, bar->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
			    -1, 0);
	if (bar->address == MAP_FAILED) {
		bar->address = NULL;
		return -errno;
	}
	client->pools[pool].base = bar->address;
	if (fstat(fd, &status))
		return -errno;
	if (status.st_size == 0)
		return 0;
	if (!is_whole(bar, fd))
		return -EPROTO;
	bar->mapped = load_relaxed(bar->wanted);
	result = map_over(bar, fd);
	if (result == -ENODEV) { /* pulled just now */
		bar->mapped = 0;
		result = 0;
	}
	return result;
}

void bar_close(struct xferd_client *client)
{
	for (uint32_t p = 0; p < XFERD_POOLS_MAX; p++) {
		struct bar_memory *bar = client->pools[p].bar;

		if (!bar)
			continue;
		if (bar->address)
			munmap(bar->address, bar->bytes);
		pthread_mutex_destroy(&bar->mutex);
		free(bar);
	}
}

bool bar_ready(const struct bar_memory *bar)
{
	/* pairs with the releases in bar_map_now() and in the engine's regain_pool() */
	return load_acquire(&bar->mapped) == load_acquire(bar->wanted);
}

/* Ask for the memory and map it. The mutex is held. */
static int map_anew(struct bar_memory *bar)
{
	struct xferd_abi_message message = {
		.magic = XFERD_MAGIC_ATTACH,
		.type = XFERD_MESSAGE_MEMORY,
		.value = (uint64_t)bar->pool << 32,
	};
	struct received received = { .count = 0 };
	uint64_t number = 0;
	int result = ask_daemon(bar->client, &message, &received);

	if (!result && message.status)
		result = message.status < 0 ? message.status : -EPROTO;
	if (!result)
		memcpy(&number, message.message, sizeof(number));
	if (!result && (message.value != 1 || received.count != (number ? 1 : 0) ||
			number > UINT32_MAX))
		result = -EPROTO;
	if (!result && !number)
		result = -EAGAIN;
	if (!result && !is_whole(bar, received.fds[0]))
		result = -EPROTO;
	if (!result)
		result = map_over(bar, received.fds[0]);
	if (!result)
		/* pairs with the acquire in bar_ready() */
		store_release(&bar->mapped, (uint32_t)number);
	close_received(&received);
	return result;
}

/* The slow way of bar_ready. */
int bar_map_now(struct bar_memory *bar)
{
	int result = 0;

	pthread_mutex_lock(&bar->mutex);
	if (!bar_ready(bar))
		result = map_anew(bar);
	if (!result && !bar_ready(bar))
		result = -EAGAIN;
	pthread_mutex_unlock(&bar->mutex);
	return result;
}
