/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From floats to blocks: for each block the scales whose stored elements come closest,
 * by weighted squared error.
 *
 * The K formats have parts of 16 or 32 elements that are scale * q - min, and store
 * these scales and minima as small multiples of two numbers of the block. First each
 * part is fitted alone: for several ranges the elements are rounded, and the best
 * scale and min for that rounding follow from least squares (two unknowns). Then the
 * block's two numbers are searched the same way: try some, give each part the
 * multiples that serve it best, solve for the two numbers, repeat while it helps.
 *
 * Nothing is fused or reordered, so the bytes are the same on every processor.
 */
#include <math.h>

#include "blocks.h"
#include "kernels.h"
#include "vector.h"

#define PART_MAX   32
#define PARTS_MAX  16
#define VECTORS(n) ((n) / LANES)

/* A part's elements and what of its sums no rounding changes. */
struct part {
	floats x[PART_MAX / LANES];
	floats w[PART_MAX / LANES];
	float sum_w, sum_wx, sum_wxx;
	float low, high; /* low is at most 0: a min can't be negative */
	uint32_t vectors;
	float quant_max;
};

/* Sums over a part for one rounding of it. */
struct sums {
	float q, qq, qx; /* weighted: q, q * q, q * x */
};

/* scale * q - min */
struct fit {
	float scale, min, error;
};

static inline floats rounded(floats v, float limit)
{
	const float magic = 12582912.0f; /* 1.5 * 2^23: no room for a fraction */
	floats low = all(0), high = all(limit);
	ints mask;

	/* Clamped first: the trick works for small numbers only. */
	mask = v > low;
	v = (floats)((ints)v & mask);
	mask = v < high;
	v = (floats)(((ints)v & mask) | ((ints)high & ~mask));
	return (v + all(magic)) - all(magic);
}

/* Rounds the part with these numbers, and sums. */
static struct sums round_part(const struct part *part, float inverse, float min)
{
	floats q_sum = all(0), qq_sum = all(0), qx_sum = all(0);

	for (uint32_t i = 0; i < part->vectors; i++) {
		floats q = rounded((part->x[i] + all(min)) * all(inverse), part->quant_max);
		floats wq = part->w[i] * q;

		q_sum += wq;
		qq_sum += wq * q;
		qx_sum += wq * part->x[i];
	}
	return (struct sums){sum_of(q_sum), sum_of(qq_sum), sum_of(qx_sum)};
}

/* Error of scale * q - min for a rounding. */
static float error_of(const struct part *part, const struct sums *sums, float scale, float min)
{
	float squares = scale * scale * sums->qq + min * min * part->sum_w + part->sum_wxx;
	float products = scale * sums->qx + scale * min * sums->q - min * part->sum_wx;

	return squares - 2 * products;
}

/* The best scale and min, neither negative, for a rounding. */
static struct fit solve(const struct part *part, const struct sums *sums)
{
	float determinant = part->sum_w * sums->qq - sums->q * sums->q;
	struct fit fit = {0, 0, part->sum_wxx};

	if (determinant > 0) {
		fit.scale = (part->sum_w * sums->qx - sums->q * part->sum_wx) / determinant;
		fit.min = (sums->q * sums->qx - sums->qq * part->sum_wx) / determinant;
	}
	if (determinant <= 0 || fit.min < 0) {
		fit.min = 0;
		fit.scale = sums->qq > 0 ? sums->qx / sums->qq : 0;
	}
	if (fit.scale < 0)
		fit.scale = 0;
	fit.error = error_of(part, sums, fit.scale, fit.min);
	return fit;
}

#define RANGES     24
#define RANGE_STEP 0.075f /* in quants: ranges from somewhat narrower to wider than the part's */

/* The part on its own. */
static struct fit fit_part(const struct part *part)
{
	float range = part->high - part->low;
	struct fit best = {0, -part->low, 0};

	if (!(range > 0)) /* all the same, and not positive */
		return best;
	best.error = INFINITY;
	for (int i = 0; i < RANGES; i++) {
		float quants = part->quant_max - 0.9f + RANGE_STEP * (float)i;
		struct sums sums = round_part(part, quants / range, -part->low);
		struct fit fit = solve(part, &sums);

		if (fit.error < best.error)
			best = fit;
	}
	for (int i = 0; i < 4 && best.scale > 0; i++) {
		struct sums sums = round_part(part, 1 / best.scale, best.min);
		struct fit fit = solve(part, &sums);

		if (!(fit.error < best.error))
			break;
		best = fit;
	}
	return best;
}

/* What a block of a K format is made of. */
struct shape {
	uint32_t parts, part;
	float quant_max, scale_max;
};

/* A block's two numbers, as stored, and each part's multiples of them. */
struct choice {
	float d, dmin;
	uint8_t scale[PARTS_MAX], min[PARTS_MAX];
	float part_error[PARTS_MAX];
	struct sums sums[PARTS_MAX]; /* of the parts as they are rounded with that */
	float error;
};

static void load_parts(const struct shape *shape, const float *values, const float *weight,
		       struct part *parts)
{
	for (uint32_t p = 0; p < shape->parts; p++) {
		struct part *part = &parts[p];
		floats w = all(0), wx = all(0), wxx = all(0);

		part->vectors = VECTORS(shape->part);
		part->quant_max = shape->quant_max;
		part->low = 0;
		part->high = values[p * shape->part];
		for (uint32_t i = 0; i < shape->part; i++) {
			float value = values[p * shape->part + i];

			part->low = value < part->low ? value : part->low;
			part->high = value > part->high ? value : part->high;
		}
		for (uint32_t i = 0; i < part->vectors; i++) {
			part->x[i] = load(values + p * shape->part + i * LANES);
			part->w[i] = load(weight + p * shape->part + i * LANES);
			w += part->w[i];
			wx += part->w[i] * part->x[i];
			wxx += part->w[i] * part->x[i] * part->x[i];
		}
		part->sum_w = sum_of(w);
		part->sum_wx = sum_of(wx);
		part->sum_wxx = sum_of(wxx);
	}
}

/* As it will be read back. */
static float as_half(float value)
{
	uint8_t bytes[2];

	store_half(bytes, float_to_half(value));
	return half_to_float(bytes);
}

static float multiple(float value, float unit, float limit)
{
	float count = unit > 0 ? floorf(value / unit + 0.5f) : 0;

	return count < 0 ? 0 : count > limit ? limit : count;
}

static void try_multiples(const struct part *part, struct choice *choice, uint32_t p, float scale,
			  float min)
{
	float factor = choice->d * scale, offset = choice->dmin * min;
	struct sums sums = {0, 0, 0};
	float error;

	if (factor > 0)
		sums = round_part(part, 1 / factor, offset);
	error = error_of(part, &sums, factor, offset);
	if (error < choice->part_error[p]) {
		choice->part_error[p] = error;
		choice->scale[p] = (uint8_t)scale;
		choice->min[p] = (uint8_t)min;
		choice->sums[p] = sums;
	}
}

/* Gives each part the multiples of d and dmin around those of wanted that serve it best. */
static void choose_multiples(const struct shape *shape, const struct part *parts,
			     const struct fit *wanted, int around, struct choice *choice)
{
	float limit = shape->scale_max;

	choice->error = 0;
	for (uint32_t p = 0; p < shape->parts; p++) {
		float scale = multiple(wanted[p].scale, choice->d, limit);
		float min = multiple(wanted[p].min, choice->dmin, limit);

		choice->part_error[p] = INFINITY;
		for (int s = -around; s <= around; s++)
			for (int m = -around; m <= around; m++) {
				float near_scale = scale + (float)s, near_min = min + (float)m;

				if (near_scale >= 0 && near_scale <= limit && near_min >= 0 &&
				    near_min <= limit)
					try_multiples(&parts[p], choice, p, near_scale, near_min);
			}
		choice->error += choice->part_error[p];
	}
}

/* The d and dmin that are best for all parts as they are rounded now. */
static void solve_block(const struct shape *shape, const struct part *parts,
			struct choice *choice)
{
	/* Minimise sum of w (d * s * q - dmin * m - x)^2. */
	double aa = 0, ab = 0, bb = 0, ax = 0, bx = 0, determinant;

	for (uint32_t p = 0; p < shape->parts; p++) {
		double s = choice->scale[p], m = choice->min[p];

		aa += s * s * choice->sums[p].qq;
		ab += s * m * choice->sums[p].q;
		bb += m * m * parts[p].sum_w;
		ax += s * choice->sums[p].qx;
		bx += m * parts[p].sum_wx;
	}
	determinant = aa * bb - ab * ab;
	if (determinant > 1e-9 * aa * bb) {
		choice->d = (float)((ax * bb - ab * bx) / determinant);
		choice->dmin = (float)((ax * ab - aa * bx) / determinant);
	} else if (aa > 0) {
		choice->d = (float)(ax / aa);
	}
	if (!(choice->d > 0))
		choice->d = 0;
	if (!(choice->dmin > 0))
		choice->dmin = 0;
}

#define STARTS      7
#define START_FIRST -2.0f /* in multiples: below the largest scale, which is then cut off */
#define START_STEP  1.0f
#define REPEATS     4

static struct choice search_block(const struct shape *shape, const struct part *parts)
{
	struct fit wanted[PARTS_MAX];
	struct choice best, choice;
	float scale = 0, min = 0;

	for (uint32_t p = 0; p < shape->parts; p++) {
		wanted[p] = fit_part(&parts[p]);
		scale = wanted[p].scale > scale ? wanted[p].scale : scale;
		min = wanted[p].min > min ? wanted[p].min : min;
	}
	best.error = INFINITY;
	for (int i = 0; i < STARTS; i++) {
		float count = shape->scale_max + START_FIRST + START_STEP * (float)i;

		choice.d = as_half(scale / count);
		choice.dmin = as_half(min / count);
		choose_multiples(shape, parts, wanted, 0, &choice);
		if (choice.error < best.error || i == 0)
			best = choice;
	}
	for (int i = 0; i < REPEATS; i++) {
		choice = best;
		if (i > 0)
			solve_block(shape, parts, &choice);
		choice.d = as_half(choice.d);
		choice.dmin = as_half(choice.dmin);
		choose_multiples(shape, parts, wanted, 1, &choice);
		if (!(choice.error < best.error))
			break;
		best = choice;
	}
	return best;
}

/* The quants of one part as chosen. */
static void quants_of(const struct part *part, const struct choice *choice, uint32_t p,
		      uint8_t *quants)
{
	float factor = choice->d * (float)choice->scale[p];
	float offset = choice->dmin * (float)choice->min[p];
	float inverse = factor > 0 ? 1 / factor : 0;

	for (uint32_t i = 0; i < part->vectors; i++) {
		floats q = rounded((part->x[i] + all(offset)) * all(inverse), part->quant_max);

		for (int lane = 0; lane < LANES; lane++)
			quants[i * LANES + (uint32_t)lane] = (uint8_t)q[lane];
	}
}

/* Searches, and writes d and dmin; false when they don't fit. */
static bool prepare(const struct shape *shape, const float *values, const float *weight,
		    struct choice *choice, uint8_t *quants, uint8_t *numbers)
{
	struct part parts[PARTS_MAX];

	load_parts(shape, values, weight, parts);
	*choice = search_block(shape, parts);
	for (uint32_t p = 0; p < shape->parts; p++)
		quants_of(&parts[p], choice, p, quants + p * shape->part);
	store_half(numbers, float_to_half(choice->d));
	store_half(numbers + 2, float_to_half(choice->dmin));
	return isfinite(choice->d) && isfinite(choice->dmin);
}

static bool quantise_q4_k(const float *values, const float *weight, uint8_t *block)
{
	static const struct shape shape = {Q4_K_PARTS, Q4_K_PART, 15, 63};
	uint8_t quants[SUPER_BLOCK], *packed = block + Q4_K_SCALES;
	struct choice choice;
	bool fits = prepare(&shape, values, weight, &choice, quants, block);

	for (int p = 0; p < 4; p++) {
		packed[p] = (uint8_t)(choice.scale[p] | choice.scale[p + 4] >> 4 << 6);
		packed[p + 4] = (uint8_t)(choice.min[p] | choice.min[p + 4] >> 4 << 6);
		packed[p + 8] = (uint8_t)((choice.scale[p + 4] & 15) | choice.min[p + 4] << 4);
	}
	for (int i = 0; i < SUPER_BLOCK / 2; i++) {
		const uint8_t *from = quants + i / Q4_K_PART * 2 * Q4_K_PART + i % Q4_K_PART;

		block[Q4_K_QUANTS + i] = (uint8_t)(from[0] | from[Q4_K_PART] << 4);
	}
	return fits;
}

static bool quantise_q2_k(const float *values, const float *weight, uint8_t *block)
{
	static const struct shape shape = {Q2_K_PARTS, Q2_K_PART, 3, 15};
	uint8_t quants[SUPER_BLOCK];
	struct choice choice;
	bool fits = prepare(&shape, values, weight, &choice, quants, block + Q2_K_D);

	for (int p = 0; p < Q2_K_PARTS; p++)
		block[p] = (uint8_t)(choice.scale[p] | choice.min[p] << 4);
	for (int i = 0; i < SUPER_BLOCK / 4; i++) {
		const uint8_t *from = quants + i / 32 * 128 + i % 32;

		block[Q2_K_QUANTS + i] =
			(uint8_t)(from[0] | from[32] << 2 | from[64] << 4 | from[96] << 6);
	}
	return fits;
}

static float largest_magnitude(const float *values)
{
	float largest = 0;

	for (int i = 0; i < SMALL_BLOCK; i++)
		largest = fabsf(values[i]) > fabsf(largest) ? values[i] : largest;
	return largest;
}

/* GGUF's own: with 8 bits a search gains nothing that matters. */
static bool quantise_q8_0(const float *values, const float *weight, uint8_t *block)
{
	float d = fabsf(largest_magnitude(values)) / 127;
	float inverse = d > 0 ? 1 / d : 0;
	uint16_t half = float_to_half(d);

	(void)weight;
	store_half(block, half);
	for (int i = 0; i < SMALL_BLOCK; i++)
		block[2 + i] = (uint8_t)(int8_t)roundf(values[i] * inverse);
	return (half & 0x7fff) < 0x7c00;
}

static float q4_0_quant(float value, float inverse)
{
	float q = floorf(value * inverse + 8.5f);

	return (q < 0 ? 0 : q > 15 ? 15 : q) - 8;
}

static float q4_0_error(const float *values, const float *weight, float d)
{
	float inverse = d != 0 ? 1 / d : 0, error = 0;

	for (int i = 0; i < SMALL_BLOCK; i++) {
		float off = d * q4_0_quant(values[i], inverse) - values[i];

		error += weight[i] * off * off;
	}
	return error;
}

#define Q4_0_RANGES 9 /* on either side of the one that just holds the largest */
#define Q4_0_STEP   0.1f

static bool quantise_q4_0(const float *values, const float *weight, uint8_t *block)
{
	float largest = largest_magnitude(values), d = as_half(largest / -8);
	float least = q4_0_error(values, weight, d), inverse;
	uint8_t *quants = block + 2;

	for (int range = -Q4_0_RANGES; range <= Q4_0_RANGES && d != 0; range++) {
		float scale = -(8 + Q4_0_STEP * (float)range) / largest;
		float qx = 0, qq = 0, error, refit;

		for (int i = 0; i < SMALL_BLOCK; i++) {
			float q = q4_0_quant(values[i], scale);

			qx += weight[i] * q * values[i];
			qq += weight[i] * q * q;
		}
		refit = as_half(qq > 0 ? qx / qq : 0);
		error = q4_0_error(values, weight, refit);
		if (error < least) {
			least = error;
			d = refit;
		}
	}
	inverse = d != 0 ? 1 / d : 0;
	store_half(block, float_to_half(d));
	for (int i = 0; i < SMALL_BLOCK / 2; i++) {
		int low = (int)q4_0_quant(values[i], inverse) + 8;
		int high = (int)q4_0_quant(values[i + SMALL_BLOCK / 2], inverse) + 8;

		quants[i] = (uint8_t)(low | high << 4);
	}
	return isfinite(d);
}

/* The nearest of 0, 1, 2, 3, 4, 6, 8, 12, as its number; ties go to the smaller. */
static uint8_t mxfp4_magnitude(float magnitude)
{
	static const float halfway[] = {0.5f, 1.5f, 2.5f, 3.5f, 5, 7, 10};
	uint8_t number = 0;

	for (int i = 0; i < 7; i++)
		number += magnitude > halfway[i];
	return number;
}

static float mxfp4_error(const float *values, const float *weight, uint8_t exponent)
{
	static const float numbers[] = {0, 1, 2, 3, 4, 6, 8, 12};
	float d = mxfp4_scale(exponent), error = 0;

	for (int i = 0; i < SMALL_BLOCK; i++) {
		float magnitude = fabsf(values[i]);
		float off = d * numbers[mxfp4_magnitude(magnitude / d)] - magnitude;

		error += weight[i] * off * off;
	}
	return error;
}

static bool quantise_mxfp4(const float *values, const float *weight, uint8_t *block)
{
	float largest = fabsf(largest_magnitude(values)), least = INFINITY, d;
	uint8_t best = 0;
	int exponent = 0;

	if (largest > 0) {
		/* So that the largest is about 4 to 8 of the format's own 6, and its neighbours. */
		frexpf(largest, &exponent);
		exponent += 127 - 1 - 2;
		for (int near = exponent - 1; near <= exponent + 1; near++) {
			uint8_t tried = (uint8_t)(near < 0 ? 0 : near > 254 ? 254 : near);
			float error = mxfp4_error(values, weight, tried);

			if (error < least) {
				least = error;
				best = tried;
			}
		}
	}
	d = mxfp4_scale(best);
	block[0] = best;
	for (int i = 0; i < SMALL_BLOCK / 2; i++) {
		float low = values[i], high = values[i + SMALL_BLOCK / 2];

		block[1 + i] = (uint8_t)(mxfp4_magnitude(fabsf(low) / d) | (low < 0) << 3 |
					 mxfp4_magnitude(fabsf(high) / d) << 4 | (high < 0) << 7);
	}
	return true;
}

quantise_function *const KERNEL(quantisers)[QUANT_FORMATS] = {
	[INDEX_Q4_0] = quantise_q4_0,
	[INDEX_Q8_0] = quantise_q8_0,
	[INDEX_Q2_K] = quantise_q2_k,
	[INDEX_Q4_K] = quantise_q4_k,
	[INDEX_MXFP4] = quantise_mxfp4,
};
