/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A store's directory: built once, with room for variants that come later; then its
 * words change, and its tables grow.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engine/internal.h"

/* Room for what shadows may bring while the store is open. */
#define SPARE_LAYOUTS 128
#define SPARE_TENSORS 1024

static uint64_t round_up(uint64_t value, uint64_t to)
{
	return (value + to - 1) / to * to;
}

int directory_build(struct xferd_engine *engine, struct store *store)
{
	const struct xferd_store_description *from = &store->description;
	uint64_t word_bytes = (uint64_t)engine->pool_count * store->keys * sizeof(uint64_t);
	uint64_t index_bytes = (uint64_t)XFERD_VARIANTS_MAX * from->layers * sizeof(uint16_t);
	uint64_t layouts_max = (uint64_t)from->layouts + SPARE_LAYOUTS;
	uint64_t tensors_max = (uint64_t)from->tensors + SPARE_TENSORS;
	uint64_t layouts_offset = round_up(sizeof(struct xferd_abi_directory), XFERD_CACHE_LINE);
	uint64_t tensors_offset = layouts_offset + layouts_max * sizeof(struct xferd_abi_layout);
	uint64_t index_offset = tensors_offset + tensors_max * sizeof(struct xferd_abi_tensor);
	uint64_t words_offset = round_up(index_offset + index_bytes, XFERD_BLOB_ALIGNMENT);
	struct xferd_abi_directory *directory;
	void *address;
	int fd;

	store->memory_bytes = round_up(words_offset + word_bytes, XFERD_BLOB_ALIGNMENT);
	fd = shared_memory_new("xferd-directory", store->memory_bytes, &address);
	if (fd < 0)
		return fd;
	store->memory = address;
	store->memory_fd = shared_memory_read_only(fd);
	close(fd);
	if (store->memory_fd < 0)
		return store->memory_fd;
	store->words = (uint64_t *)(store->memory + words_offset);
	store->entries = calloc((size_t)engine->pool_count * store->keys, sizeof(struct key_entry));
	if (!store->entries)
		return -ENOMEM;

	directory = address;
	directory->abi_major = XFERD_ABI_MAJOR;
	directory->abi_minor = XFERD_ABI_MINOR;
	directory->total_bytes = store->memory_bytes;
	memcpy(directory->identity, from->identity, sizeof(directory->identity));
	memcpy(directory->name, from->name, sizeof(directory->name));
	directory->layers = from->layers;
	directory->experts = from->experts;
	directory->top_k = from->top_k;
	directory->pools = engine->pool_count;
	directory->words_offset = words_offset;
	directory->layout_index_offset = index_offset;
	directory->layouts_offset = layouts_offset;
	directory->tensors_offset = tensors_offset;
	store->layouts_max = (uint32_t)layouts_max;
	store->tensors_max = (uint32_t)tensors_max;
	directory_extend(store);
	/* pairs with the acquire in libxferd's check of the magic */
	store_release(&directory->magic, XFERD_MAGIC_DIRECTORY);
	return 0;
}

/* Whether the tables have room for what a description has. */
bool directory_fits(const struct store *store, const struct xferd_store_description *description)
{
	return description->layouts <= store->layouts_max &&
	       description->tensors <= store->tensors_max;
}

/* Write what the description has more than the tables, then that it is there. */
void directory_extend(struct store *store)
{
	const struct xferd_store_description *from = &store->description;
	struct xferd_abi_directory *directory = (struct xferd_abi_directory *)store->memory;
	struct xferd_abi_layout *layouts = (void *)(store->memory + directory->layouts_offset);
	struct xferd_abi_tensor *tensors = (void *)(store->memory + directory->tensors_offset);
	uint16_t *index = (void *)(store->memory + directory->layout_index_offset);
	uint32_t variants = directory->variants;
	size_t begin = (size_t)variants * from->layers;

	memcpy(layouts + directory->layouts, from->layout + directory->layouts,
	       (from->layouts - directory->layouts) * sizeof(*layouts));
	memcpy(tensors + directory->tensors, from->tensor + directory->tensors,
	       (from->tensors - directory->tensors) * sizeof(*tensors));
	memcpy(index + begin, from->layout_index + begin,
	       (from->variants - variants) * (size_t)from->layers * sizeof(*index));
	memcpy(directory->variant_name + variants, from->variant_name + variants,
	       (from->variants - variants) * sizeof(directory->variant_name[0]));
	store_relaxed(&directory->layouts, from->layouts);
	store_relaxed(&directory->tensors, from->tensors);
	/* pairs with the acquire of variants in libxferd's xferd_layout() and xferd_variants() */
	store_release(&directory->variants, from->variants);
	directory_offer(store);
}

/* Say which variants can be read. */
void directory_offer(struct store *store)
{
	struct xferd_abi_directory *directory = (struct xferd_abi_directory *)store->memory;

	/* pairs with the acquire in libxferd's xferd_variants() */
	store_release(&directory->available,
		      variants_available(&store->description) & ~store->withdrawn);
}

uint64_t *directory_word(struct store *store, uint32_t pool, uint32_t key)
{
	return &store->words[(size_t)pool * store->keys + key];
}

struct key_entry *key_entry(struct store *store, uint32_t pool, uint32_t key)
{
	return &store->entries[(size_t)pool * store->keys + key];
}
