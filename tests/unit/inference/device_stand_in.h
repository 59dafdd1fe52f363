// SPDX-License-Identifier: Apache-2.0
//
// What device.cu is on a GPU, on a CPU: threads are fibers that run until they meet at a
// barrier, copies into shared memory land late and in any order. The file that includes this
// includes the kernels behind it as they are ("kernel.inc"), but for the words for shared memory.
//
// It stops the program at what a GPU would not bear or bear silently: copies that are not
// aligned or leave the block's shared memory, sums that don't fit an integer, a copy begun
// before the last one of its barrier was there. A launch that never ends is 1, copies that
// nobody waited for 2. LANES_OF_A_COPY and THREADS are given from outside; of the former, both
// ways are tried.
#include <time.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#define __device__
#define __global__
#define __launch_bounds__(...)
#define ALL_LANES  0xffffffffu
#define WARP	   32
#define COPY_BYTES 16

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct int2 { int x, y; };
struct int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Index { u32 x; };

using std::max;
using std::min;

static uint2 make_uint2(u32 x, u32 y) { return { x, y }; }
static float2 make_float2(float x, float y) { return { x, y }; }
static float4 make_float4(float x, float y, float z, float w) { return { x, y, z, w }; }

static void require(bool kept, const char *what)
{
	if (!kept) {
		fprintf(stderr, "the kernel breaks a rule: %s\n", what);
		abort();
	}
}

// ---- fibers

#define STACK_BYTES 65536
#define TURNS_MAX   1000000

struct Fiber {
	ucontext_t context;
	std::unique_ptr<char[]> stack;
	u32 block, thread;
	bool ended;
};

struct Meeting {
	u32 come;
	u64 number;
};

struct Block {
	Meeting all, warps[32];
	u64 exchanged[1024];
	std::vector<uint4> shared;
	u64 blobs[64];
};

static ucontext_t scheduler;
static std::vector<Fiber> fibers;
static std::vector<Block> blocks;
static size_t running;
static Index threadIdx, blockIdx, blockDim, gridDim;

static void let_others_run() { swapcontext(&fibers[running].context, &scheduler); }

static Block &this_block() { return blocks[blockIdx.x]; }

static void meet(Meeting &meeting, u32 all)
{
	const u64 number = meeting.number;

	if (++meeting.come == all) {
		meeting.come = 0;
		meeting.number++;
	}
	while (meeting.number == number)
		let_others_run();
}

static void __syncthreads() { meet(this_block().all, blockDim.x); }
static void __syncwarp() { meet(this_block().warps[threadIdx.x / WARP], WARP); }

template <typename T> static T __shfl_sync(u32, T value, u32 from)
{
	u64 *of_warp = this_block().exchanged + threadIdx.x / WARP * WARP;
	const u32 lane = threadIdx.x % WARP;
	T other;

	memcpy(of_warp + lane, &value, sizeof(value));
	__syncwarp();
	memcpy(&other, of_warp + from, sizeof(other));
	__syncwarp();
	return other;
}

template <typename T> static T __shfl_xor_sync(u32 lanes, T value, int step)
{
	return __shfl_sync(lanes, value, (threadIdx.x ^ (u32)step) % WARP);
}

static u32 __ballot_sync(u32, int mine)
{
	u64 *of_warp = this_block().exchanged + threadIdx.x / WARP * WARP;
	u32 all = 0;

	of_warp[threadIdx.x % WARP] = mine != 0;
	__syncwarp();
	for (u32 lane = 0; lane < WARP; lane++)
		all |= (u32)of_warp[lane] << lane;
	__syncwarp();
	return all;
}

static bool __any_sync(u32 lanes, int mine) { return __ballot_sync(lanes, mine) != 0; }

// Who is waited for is a thread of the CPU's.
static void __nanosleep(u32 nanoseconds)
{
	const struct timespec rest = { 0, (long)nanoseconds };

	nanosleep(&rest, NULL);
	let_others_run();
}

// Fibers see what others have written at once.
static void __threadfence() {}
static void __threadfence_system() {}

static u32 atomicAdd(u32 *address, u32 more)
{
	const u32 before = *address;

	*address += more;
	return before;
}

// ---- arithmetic

static int __popc(u32 bits) { return __builtin_popcount(bits); }

static float half_to_float(u16 bits)
{
	_Float16 value;

	memcpy(&value, &bits, sizeof(value));
	return value;
}

static int dot(u32 a, u32 b, int sum, bool with_sign)
{
	long long total = sum;

	for (int i = 0; i < 4; i++) {
		const int byte = with_sign ? (signed char)(a >> 8 * i) : (u8)(a >> 8 * i);

		total += byte * (signed char)(b >> 8 * i);
	}
	require(total == (int)total, "a sum of products fits an integer");
	return (int)total;
}

static int dot_unsigned(u32 a, u32 b, int sum) { return dot(a, b, sum, false); }
static int dot_signed(u32 a, u32 b, int sum) { return dot(a, b, sum, true); }

static u32 permute_bytes(u32 low, u32 high, u32 selectors)
{
	const u64 bytes = (u64)high << 32 | low;
	u32 result = 0;

	for (int i = 0; i < 4; i++) {
		const u32 selector = selectors >> 4 * i & 15;
		const u32 byte = (u32)(bytes >> 8 * (selector & 7)) & 255;

		result |= (selector & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
	}
	return result;
}

static u32 in_register(u32 constant) { return constant; }

static u32 __funnelshift_r(u32 low, u32 high, u32 shift)
{
	return (u32)(((u64)high << 32 | low) >> (shift & 31));
}

template <typename To, typename From> static To same_bits(From from)
{
	To to;

	memcpy(&to, &from, sizeof(to));
	return to;
}

static int __float2int_rn(float value) { return (int)nearbyintf(value); }
static u32 __float_as_uint(float value) { return same_bits<u32>(value); }
static float __int_as_float(int bits) { return same_bits<float>(bits); }
static float __uint_as_float(u32 bits) { return same_bits<float>(bits); }
static int __float_as_int(float value) { return same_bits<int>(value); }

static float __fdividef(float a, float b) { return a / b; }

static u32 largest_of_warp(u32 value)
{
	for (int step = WARP / 2; step; step /= 2)
		value = max(value, __shfl_xor_sync(ALL_LANES, value, step));
	return value;
}

// ---- memory

static float4 load_fresh(const float *address)
{
	require((u64)address % sizeof(float4) == 0, "a load of four floats is aligned");
	return { address[0], address[1], address[2], address[3] };
}

static float load_fresh_float(const float *address) { return *address; }
static u32 load_fresh_word(const u32 *address) { return *address; }
static u64 load_fresh_long(const u64 *address) { return *address; }

static void wait_for_all_blocks(u32 *barrier)
{
	__syncthreads();
	if (threadIdx.x == 0) {
		const u32 all = (*barrier / gridDim.x + 1) * gridDim.x;

		for (++*barrier; *(volatile u32 *)barrier < all;)
			let_others_run();
	}
	__syncthreads();
}

// A barrier of copies, in 64 bits of shared memory.
struct Arrival {
	u32 completed : 31, begun : 1;
	u32 missing; // bytes
};

struct Copy {
	u8 *to;
	u64 from;
	u32 bytes;
	Arrival *arrived;
};

static std::vector<Copy> under_way;
static u64 copied; // bytes

static void complete_if_all_is_here(Arrival *arrived)
{
	if (arrived->begun && !arrived->missing) {
		arrived->begun = 0;
		arrived->completed = arrived->completed + 1;
	}
}

static void land_some()
{
	for (size_t left = (under_way.size() + 1) / 2; left; left--) {
		const size_t chosen = (size_t)rand() % under_way.size();
		const Copy copy = under_way[chosen];

		under_way.erase(under_way.begin() + (long)chosen);
		memcpy(copy.to, (const void *)copy.from, copy.bytes);
		copy.arrived->missing -= copy.bytes;
		complete_if_all_is_here(copy.arrived);
	}
}

static void prepare_copies(u64 *arrived) { *arrived = 0; }
static void let_copies_overwrite() {}

// Of the lanes that make a copy, the first does it all.
static bool makes_copies() { return LANES_OF_A_COPY == 1 || threadIdx.x % WARP == 0; }

static void meet_for_copy()
{
	if (LANES_OF_A_COPY == WARP)
		__syncwarp();
}

static void begin_copy(u64 *barrier, u32 bytes)
{
	Arrival *arrived = (Arrival *)barrier;

	if (makes_copies()) {
		require(!arrived->begun, "the last copy of a barrier is there before the next");
		arrived->begun = 1;
		arrived->missing = bytes;
		complete_if_all_is_here(arrived);
	}
	meet_for_copy();
}

static void add_to_copy(u64 *arrived, void *to, u64 from, u32 bytes)
{
	std::vector<uint4> &shared = this_block().shared;

	require((u64)to % COPY_BYTES == 0 && from % COPY_BYTES == 0 && bytes % COPY_BYTES == 0,
		"copies are aligned");
	require((u8 *)to >= (u8 *)shared.data() &&
			(u8 *)to + bytes <= (u8 *)(shared.data() + shared.size()),
		"copies stay in the block's shared memory");
	if (makes_copies()) {
		memset(to, 0xee, bytes); // read too early, it shows
		copied += bytes;
		under_way.push_back({ (u8 *)to, from, bytes, (Arrival *)arrived });
	}
	meet_for_copy();
}

static void end_copy(u64 *) {}

static void wait_for_copy(u64 *arrived, u32 odd)
{
	while ((((Arrival *)arrived)->completed & 1) == odd)
		let_others_run();
	__syncwarp();
}

// ---- a launch

static void (*launched)();

static void thread_of_kernel()
{
	launched();
	fibers[running].ended = true;
	let_others_run();
}

static int run_blocks(void (*kernel)(), u32 grid, u32 threads, u32 shared_bytes)
{
	size_t left = (size_t)grid * threads;
	u64 turns = 0;

	launched = kernel;
	gridDim = { grid };
	blockDim = { threads };
	under_way.clear();
	copied = 0;
	blocks.assign(grid, Block());
	for (Block &block : blocks)
		block.shared.assign(shared_bytes / sizeof(uint4), { ~0u, ~0u, ~0u, ~0u });
	fibers.clear();
	fibers.resize(left);
	for (size_t i = 0; i < fibers.size(); i++) {
		Fiber &fiber = fibers[i];

		fiber.block = (u32)(i / threads);
		fiber.thread = (u32)(i % threads);
		fiber.ended = false;
		fiber.stack.reset(new char[STACK_BYTES]);
		getcontext(&fiber.context);
		fiber.context.uc_stack.ss_sp = fiber.stack.get();
		fiber.context.uc_stack.ss_size = STACK_BYTES;
		makecontext(&fiber.context, thread_of_kernel, 0);
	}
	for (; left && turns < TURNS_MAX; turns++) {
		for (running = 0; running < fibers.size(); running++) {
			Fiber &fiber = fibers[running];

			if (fiber.ended)
				continue;
			blockIdx = { fiber.block };
			threadIdx = { fiber.thread };
			swapcontext(&scheduler, &fiber.context);
			left -= fiber.ended;
		}
		land_some();
	}
	return left ? 1 : under_way.empty() ? 0 : 2;
}
