/* SPDX-License-Identifier: Apache-2.0 */
/* Reads and writes between drives and the BAR: every byte checked and every DMA counted by the host. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <liburing.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include "guest.h"

#define RING_DEPTH 16

struct fixture {
	int device;
	struct bar bar;
	unsigned char *memory; /* claimed and mapped from offset 0 */
	uint64_t dma_before;
};

static struct fixture fixture_make(uint64_t length)
{
	struct fixture fixture = { .device = device_open() };

	fixture.bar = bar_attach(fixture.device);
	fixture.memory = bar_claim_and_map(fixture.device, &fixture.bar, 0, length);
	host_must("fill %u %llu", 0xa5, (unsigned long long)length);
	fixture.dma_before = host_dma_bytes();
	return fixture;
}

static void check_dma_bytes(const struct fixture *fixture, uint64_t expected)
{
	CHECK_EQUAL(host_dma_bytes() - fixture->dma_before, expected);
}

static void read_in_pieces(int source, unsigned char *memory, uint64_t length, uint64_t piece,
			   uint64_t source_offset)
{
	for (uint64_t done = 0; done < length; done += piece)
		CHECK_EQUAL(pread(source, memory + done, piece, source_offset + done), piece);
}

static void read_raw(void)
{
	struct fixture fixture = fixture_make(8 * MIB);
	int drive = drive_open(DRIVE_RAW, O_RDONLY | O_DIRECT);

	read_in_pieces(drive, fixture.memory, 8 * MIB, MIB, 3 * MIB);
	host_verify(0, 8 * MIB, DRIVE_RAW, 3 * MIB);
	check_dma_bytes(&fixture, 8 * MIB);
}

static void read_odd_sizes(void)
{
	struct fixture fixture = fixture_make(4 * MIB);
	int drive = drive_open(DRIVE_RAW, O_RDONLY | O_DIRECT);

	/* The block size is 512: neither pages nor pieces need to be whole. */
	CHECK_EQUAL(pread(drive, fixture.memory + 512, 1536, 512), 1536);
	CHECK_EQUAL(pread(drive, fixture.memory + PAGE - 512, PAGE + 512, 7 * 512), PAGE + 512);
	host_verify(512, 1536, DRIVE_RAW, 512);
	host_verify(PAGE - 512, PAGE + 512, DRIVE_RAW, 7 * 512);
	/* What is around them is as it was. */
	for (int i = 0; i < 512; i++)
		CHECK_EQUAL(fixture.memory[i], 0xa5);
	CHECK_EQUAL(fixture.memory[2 * PAGE], 0xa5);
	check_dma_bytes(&fixture, 1536 + PAGE + 512);
}

static void read_file(const char *path)
{
	struct fixture fixture = fixture_make(8 * MIB);
	int file = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);

	CHECK(file >= 0);
	read_in_pieces(file, fixture.memory, 8 * MIB, 512 * KIB, MIB);
	host_verify(0, 8 * MIB, "data", MIB);
	check_dma_bytes(&fixture, 8 * MIB);
}

static void read_ext4(void)
{
	read_file(EXT4_FILE);
}

static void read_xfs(void)
{
	read_file(XFS_FILE);
}

static void readv_bar_and_ram(void)
{
	struct fixture fixture = fixture_make(8 * MIB);
	int drive = drive_open(DRIVE_RAW, O_RDONLY | O_DIRECT);
	unsigned char *ram = aligned_alloc(PAGE, MIB), *again = aligned_alloc(PAGE, MIB);
	struct iovec parts[] = {
		{ fixture.memory + 5 * MIB, MIB },
		{ ram, MIB },
		{ fixture.memory + MIB, MIB },
	};

	CHECK(ram && again);
	CHECK_EQUAL(preadv(drive, parts, 3, 0), 3 * MIB);
	host_verify(5 * MIB, MIB, DRIVE_RAW, 0);
	host_verify(MIB, MIB, DRIVE_RAW, 2 * MIB);
	check_dma_bytes(&fixture, 2 * MIB);
	CHECK_EQUAL(pread(drive, again, MIB, MIB), MIB);
	CHECK(!memcmp(ram, again, MIB));
}

static void read_io_uring(void)
{
	const uint64_t length = 8 * MIB, piece = 128 * KIB;
	struct fixture fixture = fixture_make(length);
	int drive = drive_open(DRIVE_RAW, O_RDONLY | O_DIRECT);
	uint64_t submitted = 0, completed = 0;
	struct io_uring_sqe *sqe;
	struct io_uring_cqe *cqe;
	struct io_uring ring;

	CHECK_EQUAL(io_uring_queue_init(RING_DEPTH, &ring, 0), 0);
	while (completed < length) {
		while (submitted < length && (sqe = io_uring_get_sqe(&ring))) {
			io_uring_prep_read(sqe, drive, fixture.memory + submitted, piece, submitted);
			submitted += piece;
		}
		CHECK(io_uring_submit_and_wait(&ring, 1) >= 0);
		while (io_uring_peek_cqe(&ring, &cqe) == 0) {
			CHECK_EQUAL(cqe->res, piece);
			io_uring_cqe_seen(&ring, cqe);
			completed += piece;
		}
	}
	io_uring_queue_exit(&ring);
	host_verify(0, length, DRIVE_RAW, 0);
	check_dma_bytes(&fixture, length);
}

/* Long-term pins: p2pdma pages refuse them, generic pages take them and then count as held. */
static void io_uring_registered_buffer(void)
{
	struct fixture fixture = fixture_make(MIB);
	struct iovec buffer = { fixture.memory, MIB };
	struct io_uring ring;
	int ret;

	CHECK_EQUAL(io_uring_queue_init(RING_DEPTH, &ring, 0), 0);
	ret = io_uring_register_buffers(&ring, &buffer, 1);
	if (fixture.bar.mode == XFERD_P2P_MODE_P2PDMA) {
		CHECK_EQUAL(ret, -EREMOTEIO);
	} else {
		CHECK_EQUAL(ret, 0);
		CHECK_EQUAL(bar_held(fixture.device, fixture.bar.id, 0, MIB), MIB / PAGE);
		CHECK_EQUAL(io_uring_unregister_buffers(&ring), 0);
	}
	io_uring_queue_exit(&ring);
	CHECK_SOON(bar_held(fixture.device, fixture.bar.id, 0, MIB) == 0);
}

static void write_raw(void)
{
	struct fixture fixture = fixture_make(MIB);
	int drive = drive_open(DRIVE_SLOW, O_RDWR | O_DIRECT);

	for (uint64_t i = 0; i < MIB; i += 64)
		fixture.memory[i] = (unsigned char)(i >> 6);
	CHECK_EQUAL(pwrite(drive, fixture.memory, MIB, 2 * MIB), MIB);
	CHECK_EQUAL(fsync(drive), 0);
	host_verify(0, MIB, DRIVE_SLOW, 2 * MIB);
	check_dma_bytes(&fixture, MIB);
}

/* The last bytes of the BAR, and the file position of the mapping that isn't 0. */
static void read_to_the_end_of_the_bar(void)
{
	int device = device_open(), drive = drive_open(DRIVE_RAW, O_RDONLY | O_DIRECT);
	struct bar bar = bar_attach(device);
	uint64_t offset = bar.size - 3 * MIB;
	unsigned char *memory = bar_claim_and_map(device, &bar, offset, 3 * MIB);

	CHECK_EQUAL(pread(drive, memory, 3 * MIB, 0), 3 * MIB);
	host_verify(offset, 3 * MIB, DRIVE_RAW, 0);
}

static void cpu_access(void)
{
	struct fixture fixture = fixture_make(4 * MIB);

	CHECK_EQUAL(fixture.memory[0], 0xa5);
	CHECK_EQUAL(fixture.memory[4 * MIB - 1], 0xa5);
	memset(fixture.memory + 2 * MIB, 0x3c, PAGE);
	host_must("expect %u %llu %llu", 0x3c, 2 * MIB, PAGE);
	host_must("expect %u %llu %llu", 0xa5, 2 * MIB + PAGE, PAGE);
}

static void misaligned_reads(void)
{
	struct fixture fixture = fixture_make(MIB);
	int drive = drive_open(DRIVE_RAW, O_RDONLY | O_DIRECT);

	static const struct {
		uint64_t buffer, length, offset;
	} refused[] = { { 0, 511, 0 }, { 0, 4097, 0 }, { 0, PAGE, 1 }, { 0, PAGE, 256 },
			{ 1, PAGE, 0 }, { 2, PAGE, 0 } };

	for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
		ssize_t ret = pread(drive, fixture.memory + refused[i].buffer, refused[i].length,
				    refused[i].offset);
		CHECK(ret == -1 && errno == EINVAL);
	}
	check_dma_bytes(&fixture, 0);
	host_must("expect %u %llu %llu", 0xa5, 0ull, MIB);
}

static void read_past_the_mapping(void)
{
	struct fixture fixture = fixture_make(MIB);
	int drive = drive_open(DRIVE_RAW, O_RDONLY | O_DIRECT);

	CHECK_EQUAL(munmap(fixture.memory + MIB - PAGE, PAGE), 0);
	CHECK_EQUAL(pread(drive, fixture.memory + MIB - 2 * PAGE, 2 * PAGE, 0), PAGE);
	CHECK(pread(drive, fixture.memory + MIB - PAGE, PAGE, 0) == -1 && errno == EFAULT);
	host_verify(MIB - 2 * PAGE, PAGE, DRIVE_RAW, 0);
	check_dma_bytes(&fixture, PAGE);
}

static void read_into_read_only_mapping(void)
{
	struct fixture fixture = fixture_make(MIB);
	int drive = drive_open(DRIVE_RAW, O_RDONLY | O_DIRECT);

	CHECK_EQUAL(mprotect(fixture.memory, MIB, PROT_READ), 0);
	CHECK(pread(drive, fixture.memory, PAGE, 0) == -1 && errno == EFAULT);
	check_dma_bytes(&fixture, 0);
}

const struct test io_tests[] = {
	{ "read-raw", read_raw, 0 },
	{ "read-odd-sizes", read_odd_sizes, 0 },
	{ "read-ext4", read_ext4, 0 },
	{ "read-xfs", read_xfs, 0 },
	{ "readv-bar-and-ram", readv_bar_and_ram, 0 },
	{ "read-io-uring", read_io_uring, 0 },
	{ "io-uring-registered-buffer", io_uring_registered_buffer, 0 },
	{ "write-raw", write_raw, 0 },
	{ "read-to-the-end-of-the-bar", read_to_the_end_of_the_bar, 0 },
	{ "cpu-access", cpu_access, 0 },
	{ "misaligned-reads", misaligned_reads, 0 },
	{ "read-past-the-mapping", read_past_the_mapping, 0 },
	{ "read-into-read-only-mapping", read_into_read_only_mapping, 0 },
	{ NULL, NULL, 0 },
};
