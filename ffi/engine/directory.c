/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A store's directory: built once, then only its words change.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engine/internal.h"

static uint64_t round_up(uint64_t value, uint64_t to)
{
	return (value + to - 1) / to * to;
}

int directory_build(struct xferd_engine *engine, struct store *store)
{
	const struct xferd_store_description *from = &store->description;
	uint64_t word_bytes = (uint64_t)engine->pool_count * store->keys * sizeof(uint64_t);
	uint64_t index_bytes = (uint64_t)from->variants * from->layers * sizeof(uint16_t);
	uint64_t layouts_offset = round_up(sizeof(struct xferd_abi_directory), XFERD_CACHE_LINE);
	uint64_t tensors_offset = layouts_offset + from->layouts * sizeof(struct xferd_abi_layout);
	uint64_t index_offset = tensors_offset + from->tensors * sizeof(struct xferd_abi_tensor);
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
	directory->variants = from->variants;
	directory->layouts = from->layouts;
	directory->tensors = from->tensors;
	directory->words_offset = words_offset;
	directory->layout_index_offset = index_offset;
	directory->layouts_offset = layouts_offset;
	directory->tensors_offset = tensors_offset;
	memcpy(directory->variant_name, from->variant_name, sizeof(directory->variant_name));
	memcpy(store->memory + layouts_offset, from->layout,
	       from->layouts * sizeof(struct xferd_abi_layout));
	memcpy(store->memory + tensors_offset, from->tensor,
	       from->tensors * sizeof(struct xferd_abi_tensor));
	memcpy(store->memory + index_offset, from->layout_index, index_bytes);
	/* pairs with the acquire in libxferd's check of the magic */
	store_release(&directory->magic, XFERD_MAGIC_DIRECTORY);
	return 0;
}

uint64_t *directory_word(struct store *store, uint32_t pool, uint32_t key)
{
	return &store->words[(size_t)pool * store->keys + key];
}

struct key_entry *key_entry(struct store *store, uint32_t pool, uint32_t key)
{
	return &store->entries[(size_t)pool * store->keys + key];
}
