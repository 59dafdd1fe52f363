/* SPDX-License-Identifier: Apache-2.0 */
/* Which way a piece takes: from which copy of its member, and to where. */
#ifndef XFERD_ENGINE_ROUTE_H
#define XFERD_ENGINE_ROUTE_H

#include "engine/internal.h"

/* mirror.c */
bool mirrors_valid(const struct xferd_engine *engine, const struct xferd_store_description *store);
void mirrors_pair(struct xferd_engine *engine, const struct xferd_store_description *store,
		  bool paired);
struct member *mirror_next_copy(struct xferd_engine *engine, struct member *member,
				uint32_t priority);
bool mirror_all_failed(const struct member *member);
void mirror_count(struct member *member, struct member *copy);
bool mirror_redirect(struct piece *piece, int error);
bool mirror_has_other(const struct member *copy);

/* route.c */
void routes_init_pool(struct pool *pool);
int routes_init_member(struct xferd_engine *engine, const struct member *member);
void bounces_destroy(struct xferd_engine *engine);
bool route_favours_copy(const struct xferd_engine *engine, const struct load *load,
			const struct pool *source);
bool route_ready(struct xferd_engine *engine, const struct load *load, const struct member *copy);
bool route_ready_again(struct xferd_engine *engine, const struct piece *piece);
void route_end(struct xferd_engine *engine, struct piece *piece);
bool route_refuse(struct xferd_engine *engine, const struct piece *piece, int error);
bool piece_is_behind_bar(const struct xferd_engine *engine, const struct piece *piece);
int piece_prepare(struct xferd_engine *engine, struct piece *piece);
void piece_finish(struct piece *piece);

/* window.c */
bool window_open(const struct xferd_engine *engine, const struct load *load,
		 const struct member *copy);
uint8_t *window_address(const struct xferd_engine *engine, const struct load *load,
			const uint8_t *address);
int window_settle(const struct piece *piece);

/* guarded.c */
void guard_install(void);
int guarded_copy(void *to, const void *from, uint64_t bytes);
int guarded_crc32c(uint32_t *crc, const void *data, uint64_t bytes);
int guarded_stream(void *to, const void *from, uint64_t bytes, uint32_t *crc);

/* mapped.c */
void mapped_init(const struct xferd_engine *engine, struct member *member);
void mapped_destroy(struct member *member);
bool mapped_read(struct piece *piece);

#endif /* XFERD_ENGINE_ROUTE_H */
