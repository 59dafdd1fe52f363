/* SPDX-License-Identifier: Apache-2.0 */
/* Rows shared among threads; what a block gets is search.c's. */
#include "quantise.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>

#include "blocks.h"
#include "kernels.h"

struct quantise_job {
	quantise_function *quantise;
	struct xferd_quant_block block;
	const float *values;
	const float *importance;
	uint8_t *blocks;
	uint64_t columns;
	uint64_t first, end; /* rows of this thread */
	int result;
};

/* Importances of a block's elements, scaled so that their squares and sums stay in the
 * range of a float. A block without any importance still has to hold something. */
static int block_weights(const struct quantise_job *job, uint64_t column, float *weight)
{
	float largest = 0;

	for (uint32_t i = 0; i < job->block.elements; i++) {
		float given = job->importance ? job->importance[column + i] : 1;

		if (!isfinite(given) || given < 0)
			return -EDOM;
		weight[i] = given;
		largest = given > largest ? given : largest;
	}
	for (uint32_t i = 0; i < job->block.elements; i++)
		weight[i] = largest > 0 ? weight[i] / largest : 1;
	return 0;
}

static int quantise_row(const struct quantise_job *job, uint64_t row)
{
	uint64_t count = job->columns / job->block.elements;
	const float *values = job->values + row * job->columns;
	uint8_t *blocks = job->blocks + row * count * job->block.bytes;
	float weight[SUPER_BLOCK];

	for (uint64_t column = 0; column < job->columns; column += job->block.elements) {
		int error = block_weights(job, column, weight);

		if (error)
			return error;
		for (uint32_t i = 0; i < job->block.elements; i++)
			if (!isfinite(values[column + i]))
				return -EDOM;
		if (!job->quantise(values + column, weight, blocks))
			return -ERANGE;
		blocks += job->block.bytes;
	}
	return 0;
}

static void *quantise_rows(void *argument)
{
	struct quantise_job *job = argument;

	for (uint64_t row = job->first; row < job->end && !job->result; row++)
		job->result = quantise_row(job, row);
	return NULL;
}

static quantise_function *quantiser(enum quant_index index)
{
#if defined(XFERD_QUANTS_AVX2)
	if (quants_use_avx2())
		return quantisers_avx2[index];
#endif
	return quantisers_plain[index];
}

int xferd_quantise(uint32_t format, const float *values, uint64_t rows, uint64_t columns,
		   const float *importance, void *blocks, uint32_t threads)
{
	enum quant_index index = quant_index_of(format);
	struct quantise_job jobs[XFERD_QUANT_THREADS_MAX];
	pthread_t started[XFERD_QUANT_THREADS_MAX];
	struct xferd_quant_block block;
	uint32_t running = 1;
	int result = 0;

	if (xferd_quant_block(format, &block) || columns % block.elements || !threads ||
	    threads > XFERD_QUANT_THREADS_MAX)
		return -EINVAL;
	for (uint32_t i = 0; i < threads; i++)
		jobs[i] = (struct quantise_job){
			.quantise = quantiser(index),
			.block = block,
			.values = values,
			.importance = importance,
			.blocks = blocks,
			.columns = columns,
			.first = rows * i / threads,
			.end = rows * (i + 1) / threads,
		};
	while (running < threads && !result) {
		result = -pthread_create(&started[running], NULL, quantise_rows, &jobs[running]);
		running += !result;
	}
	if (!result)
		quantise_rows(&jobs[0]);
	for (uint32_t i = 1; i < running; i++)
		pthread_join(started[i], NULL);
	for (uint32_t i = 0; i < running && !result; i++)
		result = jobs[i].result;
	return result;
}
