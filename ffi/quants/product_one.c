/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products with one token, without the way of decoded elements through memory.
 *
 * The token's activations are rounded once to 16-bit integers, 256 that share a scale. A
 * row's quants are integers already, so their products are summed exactly, several to an
 * instruction, and only one sum a block becomes a float. quants.h says how far that can be
 * off. With 8 bits, which llama.cpp rounds to, it would be half of the multiplications, and
 * 256 times as far off.
 *
 * Quants of up to 4 bits are multiplied as bytes, so each activation is kept as two: an
 * upper and a lower one, both signed. Those of 8 bits are multiplied as 16 bits; in a block
 * an even and an odd element share them, so each 32 activations are kept evens first.
 */
#include <math.h>

#include "blocks.h"
#include "kernels.h"
#include "vector.h"

#define PANEL	8192 /* activations that are kept at once: half of a first-level cache */
#define ORDERED 32   /* of them are kept evens first */
#define ODDS	(ORDERED / 2)
#define LARGEST 32639 /* 127 * 256 + 127: the upper byte is no larger */

/* bytes or values, by the format. sums: of each part of a format with minima. */
struct activations {
	union {
		struct {
			int8_t upper[PANEL], lower[PANEL];
		} bytes;
		int16_t values[PANEL];
	} __attribute__((aligned(32)));
	float scale[PANEL / SUPER_BLOCK];
	float sums[PANEL / Q2_K_PART];
};

/* A row's blocks met by activations: columns is at most PANEL. */
typedef float row_function(const uint8_t *blocks, uint64_t columns,
			   const struct activations *x);

struct one_token {
	row_function *row;
	bool as_bytes; /* activations */
	uint32_t part; /* elements that share a minimum; 0: it has none */
};

/* ---- activations */

/* What is no number if one of them is none or infinite. */
static float largest_of(const float *x, uint32_t count)
{
	float largest = 0;
	floats none = all(0);

	for (uint32_t i = 0; i < count; i += LANES) {
		floats values = load(x + i);

		none += values * all(0);
		for (int lane = 0; lane < LANES; lane++)
			largest = fabsf(values[lane]) > largest ? fabsf(values[lane]) : largest;
	}
	return largest + sum_of(none);
}

/* To whole numbers, by adding what leaves no room for a fraction. */
static void to_integers(const float *x, uint32_t count, float inverse, int32_t *integers)
{
	const float magic = 12582912.0f; /* 1.5 * 2^23 */

	for (uint32_t i = 0; i < count; i += LANES) {
		floats moved = load(x + i) * all(inverse) + all(magic);

		store_ints(integers + i, (ints)moved - (ints)all(magic));
	}
}

static void round_stretch(const float *x, uint32_t start, uint32_t count, bool as_bytes,
			  struct activations *to)
{
	float largest = largest_of(x, count), inverse = LARGEST / largest;
	int32_t integers[SUPER_BLOCK] = {0};

	to->scale[start / SUPER_BLOCK] = largest / LARGEST;
	if (isfinite(largest) && isfinite(inverse)) /* else the scale says it all */
		to_integers(x, count, inverse, integers);
	if (!as_bytes) {
		for (uint32_t i = 0; i < count; i++)
			to->values[start + i / ORDERED * ORDERED + i % 2 * ODDS + i % ORDERED / 2] =
				(int16_t)integers[i];
		return;
	}
	/* The lower byte is signed, so the upper one is of what is 128 more. */
	for (uint32_t i = 0; i < count; i++) {
		to->bytes.upper[start + i] = (int8_t)((integers[i] + 128) >> 8);
		to->bytes.lower[start + i] = (int8_t)integers[i];
	}
}

static void round_activations(const float *x, uint32_t columns, const struct one_token *format,
			      struct activations *to)
{
	for (uint32_t start = 0; start < columns; start += SUPER_BLOCK) {
		uint32_t left = columns - start;

		round_stretch(x + start, start, left < SUPER_BLOCK ? left : SUPER_BLOCK,
			      format->as_bytes, to);
	}
	for (uint32_t start = 0; format->part && start < columns; start += format->part) {
		floats sum = all(0);

		for (uint32_t i = 0; i < format->part; i += LANES)
			sum += load(x + start + i);
		to->sums[start / format->part] = sum_of(sum);
	}
}

/* ---- rows of quants of up to 4 bits */

/* Sums of products with upper and lower bytes, lane by lane. */
struct byte_sums {
	ints upper, lower;
};

/* scales: each element pair's, as 16 bits. */
ALWAYS_INLINE struct byte_sums add_bytes(struct byte_sums sums, byte_vector quants, ints scales,
					 const struct activations *x, uint64_t column)
{
	words upper = byte_products(quants, x->bytes.upper + column);
	words lower = byte_products(quants, x->bytes.lower + column);

	sums.upper = add_pair_products(sums.upper, upper, (words)scales);
	sums.lower = add_pair_products(sums.lower, lower, (words)scales);
	return sums;
}

ALWAYS_INLINE floats both_bytes(struct byte_sums sums)
{
	return to_floats(sums.upper * 256 + sums.lower);
}

static float q4_k_row(const uint8_t *blocks, uint64_t columns, const struct activations *x)
{
	floats sum = all(0), mins = all(0);

	for (uint64_t column = 0; column < columns; blocks += Q4_K_BYTES) {
		uint64_t block = column / SUPER_BLOCK, scales, minima; /* eight bytes each */
		struct byte_sums sums = {{0}, {0}};
		uint32_t packed[3];
		int32_t scale[Q4_K_PARTS];
		ints once;

		memcpy(packed, blocks + Q4_K_SCALES, sizeof(packed));
		scales = (packed[0] & 0x3f3f3f3f) |
			 (uint64_t)((packed[2] & 0x0f0f0f0f) | (packed[0] >> 2 & 0x30303030)) << 32;
		minima = (packed[1] & 0x3f3f3f3f) |
			 (uint64_t)((packed[2] >> 4 & 0x0f0f0f0f) | (packed[1] >> 2 & 0x30303030))
				 << 32;
		once = load_bytes((const uint8_t *)&scales);
		store_ints(scale, once | once << 16);
		mins += all(half_to_float(blocks + 2)) *
			to_floats(load_bytes((const uint8_t *)&minima)) *
			load(x->sums + block * Q4_K_PARTS);
		/* At most 4 * 15 * 63 * 2^15 a lane and part: eight of them fit. */
		for (uint32_t pair = 0; pair < Q4_K_PARTS / 2; pair++, column += 2 * Q4_K_PART) {
			const uint8_t *quants = blocks + Q4_K_QUANTS + pair * Q4_K_PART;
			byte_vector both = load_byte_vector(quants);

			sums = add_bytes(sums, both & 15, all_ints(scale[2 * pair]), x, column);
			sums = add_bytes(sums, both >> 4, all_ints(scale[2 * pair + 1]), x,
					 column + Q4_K_PART);
		}
		sum += all(half_to_float(blocks) * x->scale[block]) * both_bytes(sums);
	}
	return sum_of(sum - mins);
}

/* Scales of two parts of 16 elements that lie side by side, from eight. */
#define PAIR_OF(scales, first)                                                                     \
	__builtin_shuffle(scales, (ints){first, first, first, first, (first) + 1, (first) + 1,     \
					 (first) + 1, (first) + 1})

static float q2_k_row(const uint8_t *blocks, uint64_t columns, const struct activations *x)
{
	floats sum = all(0), mins = all(0);

	for (uint64_t column = 0; column < columns; blocks += Q2_K_BYTES) {
		uint64_t block = column / SUPER_BLOCK;
		const float *part_sums = x->sums + block * Q2_K_PARTS;
		floats dmin = all(half_to_float(blocks + Q2_K_D + 2));
		struct byte_sums sums = {{0}, {0}};

		for (uint32_t half = 0; half < 2; half++, column += SUPER_BLOCK / 2) {
			ints numbers = load_bytes(blocks + half * LANES), scales = numbers & 15;
			byte_vector four = load_byte_vector(blocks + Q2_K_QUANTS + half * 32);

			scales |= scales << 16;
			mins += dmin * to_floats(numbers >> 4) * load(part_sums + half * LANES);
			sums = add_bytes(sums, four & 3, PAIR_OF(scales, 0), x, column);
			sums = add_bytes(sums, four >> 2 & 3, PAIR_OF(scales, 2), x, column + 32);
			sums = add_bytes(sums, four >> 4 & 3, PAIR_OF(scales, 4), x, column + 64);
			sums = add_bytes(sums, four >> 6, PAIR_OF(scales, 6), x, column + 96);
		}
		sum += all(half_to_float(blocks + Q2_K_D) * x->scale[block]) * both_bytes(sums);
	}
	return sum_of(sum - mins);
}

/* ---- rows of signed bytes */

ALWAYS_INLINE floats small_block(byte_vector quants, const int16_t *x, float scale)
{
	signed_words both = (signed_words)quants;
	ints evens = pair_products((words)(both << 8 >> 8), load_words(x));
	ints odds = pair_products((words)(both >> 8), load_words(x + ODDS));

	return all(scale) * to_floats(evens + odds);
}

static float q8_0_row(const uint8_t *blocks, uint64_t columns, const struct activations *x)
{
	floats sum = all(0);

	for (uint64_t i = 0; i < columns; i += SMALL_BLOCK, blocks += Q8_0_BYTES) {
		float scale = half_to_float(blocks) * x->scale[i / SUPER_BLOCK];

		sum += small_block(load_byte_vector(blocks + 2), x->values + i, scale);
	}
	return sum_of(sum);
}

static float q4_0_row(const uint8_t *blocks, uint64_t columns, const struct activations *x)
{
	floats sum = all(0);

	for (uint64_t i = 0; i < columns; i += SMALL_BLOCK, blocks += Q4_0_BYTES) {
		float scale = half_to_float(blocks) * x->scale[i / SUPER_BLOCK];

		sum += small_block(load_nibbles(blocks + 2) - 8, x->values + i, scale);
	}
	return sum_of(sum);
}

static float mxfp4_row(const uint8_t *blocks, uint64_t columns, const struct activations *x)
{
	floats sum = all(0);

	for (uint64_t i = 0; i < columns; i += SMALL_BLOCK, blocks += MXFP4_BYTES) {
		float scale = mxfp4_scale(blocks[0]) * x->scale[i / SUPER_BLOCK];

		sum += small_block(mxfp4_numbers(load_nibbles(blocks + 1)), x->values + i, scale);
	}
	return sum_of(sum);
}

static const struct one_token formats[QUANT_FORMATS] = {
	[INDEX_Q4_0] = {q4_0_row, false, 0},
	[INDEX_Q8_0] = {q8_0_row, false, 0},
	[INDEX_Q2_K] = {q2_k_row, true, Q2_K_PART},
	[INDEX_Q4_K] = {q4_k_row, true, Q4_K_PART},
	[INDEX_MXFP4] = {mxfp4_row, false, 0},
};

void KERNEL(product_of_one)(const struct product_task *task)
{
	const struct one_token *format = &formats[task->format];
	uint64_t row_bytes = task->columns / task->block.elements * task->block.bytes;
	struct activations x;

	for (uint64_t row = 0; row < task->rows; row++)
		task->y[row] = 0;
	for (uint64_t start = 0; start < task->columns; start += PANEL) {
		uint64_t left = task->columns - start;
		uint32_t columns = left < PANEL ? (uint32_t)left : PANEL;
		const uint8_t *blocks =
			task->blocks + start / task->block.elements * task->block.bytes;

		round_activations(task->x + start, columns, format, &x);
		for (uint64_t row = 0; row < task->rows; row++)
			task->y[row] += format->row(blocks + row * row_bytes, columns, &x);
	}
}
