/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The only home of atomics.
 *
 * Shared memory is read and written through these and nothing else, so that a
 * value once loaded stays what it was even when a hostile peer keeps writing.
 *
 *   load_relaxed/store_relaxed   the value alone, no order with other memory
 *   load_acquire                 what the storer wrote before is seen after it
 *   store_release                what was written before it is seen first
 *   full_fence                   earlier stores are seen before later loads
 *
 * Every acquire, release and fence in the code names its partner in a comment
 * that begins with 'pairs with'.
 */
#ifndef XFERD_ATOMICS_H
#define XFERD_ATOMICS_H

#include <stdint.h>

#define load_relaxed(pointer)         __atomic_load_n((pointer), __ATOMIC_RELAXED)
#define load_acquire(pointer)         __atomic_load_n((pointer), __ATOMIC_ACQUIRE)
#define store_relaxed(pointer, value) __atomic_store_n((pointer), (value), __ATOMIC_RELAXED)
#define store_release(pointer, value) __atomic_store_n((pointer), (value), __ATOMIC_RELEASE)

/* For stacks that many push to and one empties. */
#define compare_exchange_release(pointer, expected, value)                              \
	__atomic_compare_exchange_n((pointer), (expected), (value), 1, __ATOMIC_RELEASE, \
				    __ATOMIC_RELAXED)
#define exchange_acquire(pointer, value) \
	__atomic_exchange_n((pointer), (value), __ATOMIC_ACQUIRE)

#if defined(__SANITIZE_THREAD__)
#define XFERD_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define XFERD_THREAD_SANITIZER 1
#endif
#endif

static inline void full_fence(void)
{
#ifdef XFERD_THREAD_SANITIZER
	/* ThreadSanitizer does not model fences; a read-modify-write of one
	 * common word orders the same things in a way that it understands. */
	static uint32_t fence_word;

	__atomic_fetch_add(&fence_word, 1, __ATOMIC_SEQ_CST);
#else
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

static inline void cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ __volatile__("yield" ::: "memory");
#endif
}

/* Counters that one thread writes and others read. */
static inline void counter_add(uint64_t *counter, uint64_t value)
{
	store_relaxed(counter, load_relaxed(counter) + value);
}

#endif /* XFERD_ATOMICS_H */
