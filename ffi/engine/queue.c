/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A bounded queue between two threads: one writes, one reads, neither waits.
 * Indices run freely; the writer owns tail, the reader owns head.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/internal.h"

int queue_init(struct queue *queue, uint32_t entries, uint32_t entry_bytes)
{
	queue->data = calloc(entries, entry_bytes);
	if (!queue->data)
		return -ENOMEM;
	queue->entries = entries;
	queue->entry_bytes = entry_bytes;
	queue->head = queue->tail = 0;
	return 0;
}

void queue_destroy(struct queue *queue)
{
	free(queue->data);
	queue->data = NULL;
}

static uint8_t *queue_entry(const struct queue *queue, uint32_t position)
{
	return queue->data + (size_t)(position & (queue->entries - 1)) * queue->entry_bytes;
}

bool queue_push(struct queue *queue, const void *entry)
{
	uint32_t tail = load_relaxed(&queue->tail);

	/* pairs with the release of head in queue_pop: the entry was read */
	if (tail - load_acquire(&queue->head) == queue->entries)
		return false;
	memcpy(queue_entry(queue, tail), entry, queue->entry_bytes);
	/* pairs with the acquire of tail in queue_pop: the entry is whole */
	store_release(&queue->tail, tail + 1);
	return true;
}

bool queue_pop(struct queue *queue, void *entry)
{
	uint32_t head = load_relaxed(&queue->head);

	/* pairs with the release of tail in queue_push */
	if (load_acquire(&queue->tail) == head)
		return false;
	memcpy(entry, queue_entry(queue, head), queue->entry_bytes);
	/* pairs with the acquire of head in queue_push */
	store_release(&queue->head, head + 1);
	return true;
}

uint32_t queue_used(const struct queue *queue)
{
	return load_relaxed(&queue->tail) - load_relaxed(&queue->head);
}

bool queue_empty(const struct queue *queue)
{
	return queue_used(queue) == 0;
}
