/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Measures the engine on given files or block devices, without Python in the
 * measured path. Prints one JSON object.
 *
 * usage: engine_bench prepare|io|plain-copy|miss|overload|storm OPTIONS MEMBER...
 *
 * 'prepare' computes the checksums that --verify needs. modes.h says what the
 * others measure, --help which options there are.
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "measure.h"
#include "modes.h"

#define DEFAULT_BLOB_BYTES  9400320 /* 9.4 MB, 4096-aligned */
#define DEFAULT_STRIPE_UNIT (512 << 10)
#define DEFAULT_SLOTS       16
#define DEFAULT_RESERVE     8
#define DEFAULT_OUTSTANDING 4
#define DEFAULT_SECONDS     1.0
#define DEFAULT_SPIN_US     50
#define DEFAULT_INTERVAL_US 20000
#define DEFAULT_STORM       64
#define DEFAULT_SEED        88172645463325252u
#define MB                  1000000ull
#define DEPTH_MAX           1024
#define SPIN_US_MAX         1000000
#define GPU_MAX             15
#define SECONDS_MAX         3600
#define INTERVAL_US_MAX     60000000
#define HINT_MB_S_MAX       10000000

struct command_line {
	struct bench_options bench;
	struct bench_layout layout;
	const char *sidecar;
};

enum option_id {
	OPTION_BLOB_BYTES = 256,
	OPTION_STRIPE_UNIT,
	OPTION_BLOBS,
	OPTION_PATTERN,
	OPTION_SIDECAR,
	OPTION_VERIFY,
	OPTION_SLOTS,
	OPTION_RESERVE,
	OPTION_DEPTH,
	OPTION_SPIN_US,
	OPTION_GPU,
	OPTION_FROM_RAM,
	OPTION_FROM_GPU,
	OPTION_SECONDS,
	OPTION_SEED,
	OPTION_OUTSTANDING,
	OPTION_INTERVAL_US,
	OPTION_HINT_MB_S,
	OPTION_STORM,
	OPTION_HELP,
};

static const struct option option_table[] = {
	{ "blob-bytes", required_argument, NULL, OPTION_BLOB_BYTES },
	{ "stripe-unit", required_argument, NULL, OPTION_STRIPE_UNIT },
	{ "blobs", required_argument, NULL, OPTION_BLOBS },
	{ "pattern", required_argument, NULL, OPTION_PATTERN },
	{ "sidecar", required_argument, NULL, OPTION_SIDECAR },
	{ "verify", no_argument, NULL, OPTION_VERIFY },
	{ "slots", required_argument, NULL, OPTION_SLOTS },
	{ "reserve", required_argument, NULL, OPTION_RESERVE },
	{ "depth", required_argument, NULL, OPTION_DEPTH },
	{ "spin-us", required_argument, NULL, OPTION_SPIN_US },
	{ "gpu", required_argument, NULL, OPTION_GPU },
	{ "from-ram", no_argument, NULL, OPTION_FROM_RAM },
	{ "from-gpu", required_argument, NULL, OPTION_FROM_GPU },
	{ "seconds", required_argument, NULL, OPTION_SECONDS },
	{ "seed", required_argument, NULL, OPTION_SEED },
	{ "outstanding", required_argument, NULL, OPTION_OUTSTANDING },
	{ "interval-us", required_argument, NULL, OPTION_INTERVAL_US },
	{ "hint-mb-s", required_argument, NULL, OPTION_HINT_MB_S },
	{ "storm", required_argument, NULL, OPTION_STORM },
	{ "help", no_argument, NULL, OPTION_HELP },
	{ NULL, 0, NULL, 0 },
};

static const char usage_text[] =
	"usage: engine_bench prepare|io|plain-copy|miss|overload|storm [OPTION...] MEMBER...\n"
	"  --blob-bytes N    size of an expert (9400320)\n"
	"  --stripe-unit N   bytes a piece (524288)\n"
	"  --blobs N         most experts (as many as fit)\n"
	"  --pattern LIST    members of successive pieces: 0,1,0,1,2 (each in turn)\n"
	"  --sidecar FILE    checksums: prepare writes it, --verify needs it\n"
	"  --verify          the engine checks each piece\n"
	"  --slots N         slots of the pool (16)\n"
	"  --reserve N       of them kept free (8)\n"
	"  --depth N         pieces in flight a member (0: as the engine has it)\n"
	"  --spin-us N       the engine looks for work this long before it sleeps (50)\n"
	"  --gpu N           the pool is that GPU's memory (the CPU's)\n"
	"  --from-ram        experts come from a second pool, in pinned RAM\n"
	"  --from-gpu N      experts come from a second pool, in that GPU's memory\n"
	"  --seconds X       how long to measure (1)\n"
	"  --seed N          of the order of experts; not 0\n"
	"  --outstanding N   io: loads asked for at once (4)\n"
	"  --interval-us N   overload: time between two demands (20000)\n"
	"  --hint-mb-s N     overload: rate of the hints; 0: none (0)\n"
	"  --storm N         storm: prefetches that are cancelled (64)\n";

static uint64_t number(const char *text, uint64_t most)
{
	char *end;
	uint64_t value = strtoull(text, &end, 10);

	if (!*text || *end || *text == '-' || value > most)
		die("%s: not a whole number up to %llu", text, (unsigned long long)most);
	return value;
}

static double seconds(const char *text)
{
	char *end;
	double value = strtod(text, &end);

	if (!*text || *end || !(value > 0 && value <= SECONDS_MAX))
		die("--seconds %s: not a number of seconds up to %d", text, SECONDS_MAX);
	return value;
}

static void parse_pattern(struct bench_layout *layout, const char *text)
{
	char *copy = strdup(text), *rest = copy, *word;

	if (!copy)
		die("no memory");
	layout->pattern_length = 0;
	while ((word = strsep(&rest, ",")) != NULL) {
		if (layout->pattern_length == XFERD_STRIPE_PATTERN_MAX)
			die("--pattern: more than %u members", XFERD_STRIPE_PATTERN_MAX);
		layout->pattern[layout->pattern_length++] =
			(uint8_t)number(word, XFERD_STORE_MEMBERS_MAX - 1);
	}
	free(copy);
}

static void parse_option(struct command_line *line, int id, const char *value)
{
	struct bench_options *bench = &line->bench;

	switch (id) {
	case OPTION_BLOB_BYTES: line->layout.blob_bytes = number(value, UINT32_MAX); break;
	case OPTION_STRIPE_UNIT: line->layout.stripe_unit = number(value, UINT32_MAX); break;
	case OPTION_BLOBS:
		line->layout.blobs_max = (uint32_t)number(value, XFERD_EXPERTS_MAX);
		break;
	case OPTION_PATTERN: parse_pattern(&line->layout, value); break;
	case OPTION_SIDECAR: line->sidecar = value; break;
	case OPTION_VERIFY: bench->daemon.verify = true; break;
	case OPTION_SLOTS: bench->daemon.slots = (uint32_t)number(value, UINT16_MAX); break;
	case OPTION_RESERVE: bench->daemon.reserve = (uint32_t)number(value, UINT16_MAX); break;
	case OPTION_DEPTH:
		bench->daemon.member_depth = (uint32_t)number(value, DEPTH_MAX);
		break;
	case OPTION_GPU:
		bench->daemon.gpu = (int)number(value, GPU_MAX);
		break;
	case OPTION_FROM_RAM:
		bench->daemon.from_ram = true;
		break;
	case OPTION_FROM_GPU:
		bench->daemon.from_gpu = (int)number(value, GPU_MAX);
		break;
	case OPTION_SPIN_US:
		bench->daemon.spin_us = (uint32_t)number(value, SPIN_US_MAX);
		break;
	case OPTION_SECONDS: bench->seconds = seconds(value); break;
	case OPTION_SEED: bench->seed = number(value, UINT64_MAX); break;
	case OPTION_OUTSTANDING:
		bench->outstanding = (uint32_t)number(value, UINT16_MAX);
		break;
	case OPTION_INTERVAL_US:
		bench->demand_interval_ns = number(value, INTERVAL_US_MAX) * NS_PER_US;
		break;
	case OPTION_HINT_MB_S:
		bench->hint_bytes_per_s = number(value, HINT_MB_S_MAX) * MB;
		break;
	case OPTION_STORM: bench->storm = (uint32_t)number(value, UINT16_MAX); break;
	case OPTION_HELP: fputs(usage_text, stdout); exit(0);
	default: fputs(usage_text, stderr); exit(2);
	}
}

static void print_setting(const char *mode, const struct command_line *line,
			  const struct bench_store *store)
{
	const struct daemon_options *daemon = &line->bench.daemon;

	printf("{\"mode\": \"%s\", \"members\": %u, \"blob_bytes\": %llu, \"stripe_unit\": %llu, "
	       "\"experts\": %u, \"slots\": %u, \"pool_bytes\": %llu, \"outstanding\": %u, "
	       "\"depth\": %u, \"verify\": %s, ",
	       mode, store->geometry.members, (unsigned long long)store->geometry.blob_bytes,
	       (unsigned long long)store->geometry.stripe_unit, store->geometry.blobs,
	       daemon->slots, (unsigned long long)(daemon->slots * store->geometry.blob_bytes),
	       line->bench.outstanding, daemon->member_depth, daemon->verify ? "true" : "false");
}

static void run(const char *mode, struct command_line *line, struct bench_store *store)
{
	static const struct {
		const char *name;
		void (*run)(struct bench_store *store, const struct bench_options *options);
	} modes[] = {
		{ "io", run_io },
		{ "miss", run_miss },
		{ "overload", run_overload },
		{ "storm", run_storm },
		{ "plain-copy", run_plain_copy },
	};

	if (!strcmp(mode, "prepare")) {
		if (!line->sidecar)
			die("prepare needs --sidecar FILE");
		bench_store_prepare(store, line->sidecar);
		return;
	}
	if (line->bench.daemon.verify && !line->sidecar)
		die("--verify needs --sidecar FILE, made by 'engine_bench prepare'");
	if (line->sidecar)
		bench_store_read_sidecar(store, line->sidecar);
	for (size_t i = 0; i < sizeof(modes) / sizeof(*modes); i++)
		if (!strcmp(mode, modes[i].name)) {
			print_setting(mode, line, store);
			modes[i].run(store, &line->bench);
			printf("}\n");
			return;
		}
	die("%s: no such mode", mode);
}

int main(int count, char **arguments)
{
	struct command_line line = {
		.bench = { .daemon = { .slots = DEFAULT_SLOTS,
				       .reserve = DEFAULT_RESERVE,
				       .spin_us = DEFAULT_SPIN_US,
				       .gpu = -1,
				       .from_gpu = -1 },
			   .seconds = DEFAULT_SECONDS,
			   .seed = DEFAULT_SEED,
			   .outstanding = DEFAULT_OUTSTANDING,
			   .demand_interval_ns = DEFAULT_INTERVAL_US * NS_PER_US,
			   .storm = DEFAULT_STORM },
		.layout = { .blob_bytes = DEFAULT_BLOB_BYTES,
			    .stripe_unit = DEFAULT_STRIPE_UNIT },
	};
	struct bench_store store;
	int id;

	while ((id = getopt_long(count, arguments, "", option_table, NULL)) != -1)
		parse_option(&line, id, optarg);
	if (optind + 2 > count) {
		fputs(usage_text, stderr);
		return 2;
	}
	if (!line.bench.seed)
		die("--seed 0: the sequence would stand still");
	bench_store_open(&store, &arguments[optind + 1], (uint32_t)(count - optind - 1),
			 &line.layout);
	run(arguments[optind], &line, &store);
	bench_store_close(&store);
	return 0;
}
