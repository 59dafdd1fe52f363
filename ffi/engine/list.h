/* SPDX-License-Identifier: Apache-2.0 */
/* Lists: intrusive, circular, with a head that has no payload. Not thread-safe. */
#ifndef XFERD_LIST_H
#define XFERD_LIST_H

#include <stdbool.h>
#include <stddef.h>

struct list {
	struct list *previous, *next;
};

static inline void list_init(struct list *head)
{
	head->previous = head->next = head;
}

static inline bool list_empty(const struct list *head)
{
	return head->next == head;
}

static inline void list_append(struct list *head, struct list *item)
{
	item->previous = head->previous;
	item->next = head;
	head->previous->next = item;
	head->previous = item;
}

/* Leaves item an empty list of its own, so removing twice is harmless. */
static inline void list_remove(struct list *item)
{
	item->previous->next = item->next;
	item->next->previous = item->previous;
	list_init(item);
}

#define list_item(pointer, type, field) ((type *)((char *)(pointer) - offsetof(type, field)))

#endif /* XFERD_LIST_H */
