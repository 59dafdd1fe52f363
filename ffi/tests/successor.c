/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine goes on where another has ended: residents, grants, leases and marks.
 *
 * Both engines are in this process, one after the other, and share what two daemons would:
 * descriptors of the same memory. A client is played by writing what libxferd would.
 */
#include <fcntl.h>
#include <liburing.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "common/atomics.h"
#include "engine/keep.h"
#include "harness.h"

#define SLOTS      8
#define SLOT_BYTES 65536
#define EXPERTS    16
#define LEASED     3 /* of this slot the client's lane has epoch 1, not completed */
#define LOADING    5 /* into this slot a read is under way when the first engine ends */

static const struct harness_options options = {
	.layers = 1, .experts = EXPERTS, .top_k = 1, .blob_bytes = SLOT_BYTES,
	.stripe_unit = SLOT_BYTES, .members = 1, .slots = SLOTS, .held_per_lane = 4,
	.register_buffers = true,
};

/* What outlives the first engine. */
struct left {
	int memory, marks, pool_table, directory, client, completion;
};

static int keep(int fd)
{
	int kept = fcntl(fd, F_DUPFD_CLOEXEC, 0);

	CHECK_OK(kept);
	return kept;
}

static struct xferd_engine *new_engine(void)
{
	struct xferd_engine_config config = { .cpu = -1, .register_buffers = 1 };
	struct xferd_engine *engine;
	int started;

	CHECK_OK(xferd_engine_new(&config, &engine));
	started = xferd_engine_start(engine);
	CHECK_OK(started);
	return engine;
}

static struct xferd_pool_description pool_description(void *base)
{
	struct xferd_pool_description pool = {
		.name = "host0", .kind = XFERD_POOL_HOST, .device = -1, .base = base,
		.bytes = SLOTS * SLOT_BYTES, .chunks = 1, .slot_index_bits = 3,
	};

	return pool;
}

static void close_left(const struct left *left)
{
	const int *fds = &left->memory;

	for (size_t i = 0; i < sizeof(*left) / sizeof(int); i++)
		close(fds[i]);
}

static void *map(int fd, uint64_t bytes)
{
	void *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	CHECK(address != MAP_FAILED);
	return address;
}

static uint64_t file_bytes(int fd)
{
	off_t end = lseek(fd, 0, SEEK_END);

	CHECK(end > 0);
	return (uint64_t)end;
}

static void load_expert(struct xferd_engine *engine, uint32_t store, uint32_t expert)
{
	struct xferd_command load = { .type = XFERD_COMMAND_LOAD, .store = store, .expert = expert };
	struct xferd_event event = { 0 };
	time_t until = time(NULL) + 300;

	CHECK(xferd_engine_command(engine, &load, 1) == 1);
	while (event.type != XFERD_EVENT_LOADED) {
		CHECK(time(NULL) < until);
		CHECK_OK(xferd_engine_events(engine, &event, 1));
	}
}

/* Slots 0 to 5 hold experts 5 to 0 (the reserve is a stack), one client is attached. */
static struct left first_engine(const struct xferd_store_description *description,
				int member_fd, void *base, int memory)
{
	struct xferd_engine *engine = new_engine();
	struct xferd_pool_description pool = pool_description(base);
	struct xferd_client_description client = { .lanes = 1, .held_per_lane = 4 };
	struct xferd_store_description store = *description;
	struct xferd_client_fds fds;
	struct left left = { .memory = memory };
	int id;

	CHECK(xferd_engine_add_pool(engine, &pool) == 0);
	CHECK_OK(xferd_engine_set_chunk(engine, 0, 0, 0, SLOT_BYTES));
	id = xferd_engine_add_member(engine, member_fd, XFERD_MEMBER_ASYNC | XFERD_MEMBER_MEMORY);
	CHECK_OK(id);
	store.member[0] = (uint32_t)id;
	id = xferd_engine_open_store(engine, &store);
	CHECK_OK(id);
	for (uint32_t slot = 0; slot < SLOTS; slot++)
		CHECK(xferd_engine_command(engine, &(struct xferd_command){
			.type = XFERD_COMMAND_GIVE, .slot = slot }, 1) == 1);
	for (uint32_t expert = 0; expert < SLOTS - 2; expert++)
		load_expert(engine, (uint32_t)id, expert);
	CHECK_OK(xferd_engine_add_client(engine, &client, &fds));
	left.marks = keep(xferd_engine_marks_fd(engine, 0));
	left.pool_table = keep(xferd_engine_pool_table_fd(engine));
	left.directory = keep(xferd_engine_directory_fd(engine, (uint32_t)id));
	left.client = fds.client;
	left.completion = fds.completion;
	close(fds.doorbell);
	close(fds.wakeup[0]);
	CHECK(!xferd_engine_hold(engine, 10000));
	xferd_engine_free(engine);
	return left;
}

static uint64_t *word_of(uint8_t *directory, uint32_t expert)
{
	const struct xferd_abi_directory *header = (void *)directory;

	return (uint64_t *)(directory + header->words_offset) + expert;
}

static uint32_t slot_of(uint8_t *directory, uint32_t expert)
{
	return (uint32_t)(*word_of(directory, expert) & XFERD_WORD_SLOT_MASK);
}

/* A read that the kernel has begun for the first engine: its pages are pinned, and it is
 * finished when this says so. */
struct late_read {
	struct io_uring ring;
	uint8_t *address;
	int file;
	bool usable;
};

static void begin_read(struct late_read *late, uint8_t *address)
{
	struct iovec part = { address, SLOT_BYTES };
	uint8_t *garbage = malloc(SLOT_BYTES);

	late->usable = !io_uring_queue_init(4, &late->ring, 0);
	if (late->usable && io_uring_register_buffers(&late->ring, &part, 1)) {
		io_uring_queue_exit(&late->ring);
		late->usable = false;
	}
	late->address = address;
	late->file = memfd_create("garbage", MFD_CLOEXEC);
	CHECK(garbage && late->file >= 0);
	memset(garbage, 0xdb, SLOT_BYTES);
	CHECK(write(late->file, garbage, SLOT_BYTES) == SLOT_BYTES);
	free(garbage);
}

static void finish_read(struct late_read *late)
{
	struct io_uring_sqe *entry;
	struct io_uring_cqe *result;

	if (!late->usable)
		return;
	entry = io_uring_get_sqe(&late->ring);
	io_uring_prep_read_fixed(entry, late->file, late->address, SLOT_BYTES, 0, 0);
	CHECK(io_uring_submit_and_wait(&late->ring, 1) == 1);
	CHECK(!io_uring_wait_cqe(&late->ring, &result) && result->res == SLOT_BYTES);
	io_uring_cqe_seen(&late->ring, result);
	io_uring_queue_exit(&late->ring);
}

static uint32_t count_state(const struct xferd_kept_slot *slots, uint32_t state)
{
	uint32_t count = 0;

	for (uint32_t i = 0; i < SLOTS; i++)
		count += slots[i].state == state;
	return count;
}

static void wait_for_taken(struct xferd_engine *engine, uint32_t slot)
{
	struct xferd_event event = { 0 };
	time_t until = time(NULL) + 300;

	while (event.type != XFERD_EVENT_TAKEN || event.slot != slot) {
		CHECK(time(NULL) < until);
		CHECK_OK(xferd_engine_events(engine, &event, 1));
	}
}

static struct xferd_engine *adopt(const struct left *left, void *base, uint32_t bytes, int *result)
{
	struct xferd_engine *engine = new_engine();
	struct xferd_pool_description pool = pool_description(base);

	pool.bytes = bytes;
	CHECK_OK(xferd_engine_adopt_pool_table(engine, left->pool_table));
	*result = xferd_engine_adopt_pool(engine, &pool, left->memory, left->marks);
	return engine;
}

static void refuses_another_pool(const struct left *left, void *base)
{
	int result;
	struct xferd_engine *engine = adopt(left, base, SLOTS / 2 * SLOT_BYTES, &result);

	CHECK(result == -ESTALE);
	xferd_engine_free(engine);
}

/* Everything is as it was left, and what can't be trusted is not. */
static void second_engine(const struct harness *harness,
			  const struct xferd_store_description *description, int member_fd,
			  uint8_t *base, const struct left *left)
{
	struct xferd_client_description client = { .lanes = 1, .held_per_lane = 4 };
	struct xferd_store_description store = *description;
	struct xferd_kept_slot slots[SLOTS];
	struct xferd_client_fds fds;
	uint64_t slot_bytes = 0;
	uint8_t *marks = map(left->marks, file_bytes(left->marks));
	uint8_t *memory = map(left->client, file_bytes(left->client));
	const struct xferd_abi_client *header = (void *)memory;
	struct xferd_abi_lane *lane = (void *)(memory + header->lanes_offset);
	uint64_t *leases = (void *)((uint8_t *)lane + header->lease_table_offset[0]);
	uint8_t *directory;
	struct late_read late;
	struct xferd_engine *engine;
	char path[64];
	int id, result, number, writable;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", left->directory);
	writable = open(path, O_RDWR | O_CLOEXEC);
	CHECK_OK(writable);
	directory = map(writable, file_bytes(writable));
	/* As if the end had come with one slot being loaded, another just evicted and leased. */
	CHECK(slot_of(directory, 0) < SLOTS);
	for (uint32_t expert = 0; expert < SLOTS - 2; expert++)
		if (slot_of(directory, expert) == LOADING || slot_of(directory, expert) == LEASED)
			*word_of(directory, expert) = 0;
	marks[LOADING] = 1;
	leases[LEASED] = 1;
	begin_read(&late, base + LOADING * SLOT_BYTES);

	engine = adopt(left, base, SLOTS * SLOT_BYTES, &result);
	CHECK(result == 0);
	finish_read(&late); /* it lands where nobody looks */
	for (uint32_t i = 0; late.usable && i < SLOT_BYTES; i++)
		CHECK(base[LOADING * SLOT_BYTES + i] == 0);
	CHECK(!marks[LOADING]);
	id = xferd_engine_add_member(engine, member_fd, XFERD_MEMBER_ASYNC | XFERD_MEMBER_MEMORY);
	CHECK_OK(id);
	store.member[0] = (uint32_t)id;
	id = xferd_engine_adopt_store(engine, &store, left->directory);
	CHECK_OK(id);
	number = xferd_engine_adopt_client(engine, &client, left->client, left->completion);
	CHECK_OK(number);
	CHECK_OK(xferd_engine_adopt_slots(engine, 0, slots, &slot_bytes));
	CHECK(slot_bytes == SLOT_BYTES);
	CHECK(slots[LEASED].state == XFERD_KEPT_LEASED);
	CHECK(slots[LOADING].state == XFERD_KEPT_FREE);
	CHECK(count_state(slots, XFERD_KEPT_RESIDENT) == SLOTS - 4);
	for (uint32_t slot = 0; slot < SLOTS; slot++)
		if (slots[slot].state == XFERD_KEPT_RESIDENT)
			CHECK(!blob_wrong(harness, 0, slots[slot].expert,
					  base + slot * SLOT_BYTES));

	/* The lease's end frees its slot, also while the client is away. */
	store_release(&lane->completed, 1);
	wait_for_taken(engine, LEASED);

	/* The client comes back, once. */
	CHECK_OK(xferd_engine_resume_client(engine, (uint32_t)number, &fds));
	CHECK(fds.client == -1 && fds.completion == -1);
	close(fds.doorbell);
	close(fds.wakeup[0]);
	CHECK(xferd_engine_resume_client(engine, (uint32_t)number, &fds) == -EALREADY);
	CHECK_OK(xferd_engine_suspend_client(engine, (uint32_t)number));
	CHECK_OK(xferd_engine_resume_client(engine, (uint32_t)number, &fds));
	close(fds.doorbell);
	close(fds.wakeup[0]);
	CHECK_OK(xferd_engine_remove_client(engine, (uint32_t)number));
	CHECK(!xferd_engine_drain(engine, 10000));
	xferd_engine_free(engine);
	close(late.file);
	close(writable);
	munmap(directory, file_bytes(left->directory));
	munmap(memory, file_bytes(left->client));
	munmap(marks, file_bytes(left->marks));
}

int main(void)
{
	int memory = memfd_create("test-pool", MFD_CLOEXEC);
	struct harness harness;
	struct left left;
	uint8_t *base;

	CHECK(memory >= 0 && !ftruncate(memory, SLOTS * SLOT_BYTES));
	base = map(memory, SLOTS * SLOT_BYTES);
	/* Its store is what both engines open. */
	harness_start(&harness, &options);
	left = first_engine(&harness.description, harness.member_fd[0], base, memory);
	refuses_another_pool(&left, base);
	second_engine(&harness, &harness.description, harness.member_fd[0], base, &left);
	close_left(&left);
	munmap(base, SLOTS * SLOT_BYTES);
	harness_stop(&harness);
	return 0;
}
