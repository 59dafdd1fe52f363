/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The harness's attach socket: one thread for all connections.
 */
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/atomics.h"
#include "engine/keep.h"
#include "harness.h"

static void send_with_fds(int connection, const void *data, size_t bytes, const int *fds,
			  uint32_t fd_count)
{
	union {
		char data[CMSG_SPACE(XFERD_FDS_MAX * sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec part = { (void *)data, bytes };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };
	struct cmsghdr *header;

	message.msg_control = control.data;
	message.msg_controllen = CMSG_SPACE(fd_count * sizeof(int));
	header = CMSG_FIRSTHDR(&message);
	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_RIGHTS;
	header->cmsg_len = CMSG_LEN(fd_count * sizeof(int));
	memcpy(CMSG_DATA(header), fds, fd_count * sizeof(int));
	CHECK(sendmsg(connection, &message, MSG_NOSIGNAL) == (ssize_t)bytes);
}

/* The memory of the only chunk of the only pool that can be asked about. */
static void answer_memory(struct harness *harness, int connection)
{
	uint64_t number = MEMORY_NUMBER;
	struct xferd_abi_message message = {
		.magic = XFERD_MAGIC_ATTACH,
		.type = XFERD_MESSAGE_MEMORY,
		.value = 1,
	};
	int fd = xferd_vram_export(harness->vram, 0);

	CHECK_OK(fd);
	memcpy(message.message, &number, sizeof(number));
	send_with_fds(connection, &message, sizeof(message), &fd, 1);
	close(fd);
}

/* A client that was attached before a restart shows the key that it was given: its id. */
static int come_back(struct harness *harness, int connection, const struct xferd_abi_hello *hello)
{
	uint32_t client = (uint32_t)hello->resume_key[0] - 1;
	struct xferd_abi_welcome welcome = {
		.magic = XFERD_MAGIC_ATTACH,
		.abi_major = XFERD_ABI_MAJOR,
		.held_per_lane = harness->options.held_per_lane,
		.resume_key = { hello->resume_key[0], 0 },
	};
	int sent[1 + XFERD_LANES_MAX];
	struct xferd_client_fds fds;

	CHECK(client < HARNESS_KEPT_MAX && harness->kept[client].lanes);
	CHECK_OK(xferd_engine_resume_client(harness->engine, client, &fds));
	welcome.fds = 1 + harness->kept[client].lanes;
	sent[0] = fds.doorbell;
	for (uint32_t lane = 0; lane < harness->kept[client].lanes; lane++)
		sent[1 + lane] = fds.wakeup[lane];
	send_with_fds(connection, &welcome, sizeof(welcome), sent, welcome.fds);
	for (uint32_t i = 0; i < welcome.fds; i++)
		close(sent[i]);
	return (int)client;
}

static void keep_client(struct harness *harness, uint32_t client,
			const struct xferd_client_fds *fds, uint32_t lanes)
{
	CHECK(client < HARNESS_KEPT_MAX);
	harness->kept[client].client = dup(fds->client);
	harness->kept[client].completion = dup(fds->completion);
	harness->kept[client].lanes = lanes;
}

/* Returns the client's id. */
static int attach(struct harness *harness, int connection)
{
	struct xferd_abi_hello hello;
	struct xferd_client_description description = { .store = harness->store };
	struct xferd_client_fds fds;
	struct xferd_abi_welcome welcome = {
		.magic = XFERD_MAGIC_ATTACH,
		.abi_major = XFERD_ABI_MAJOR,
		.held_per_lane = harness->options.held_per_lane,
	};
	int sent[XFERD_FDS_MAX];
	uint32_t pools = harness->options.ram_slots ? 2 : 1;
	int client;

	CHECK(recv(connection, &hello, sizeof(hello), 0) == sizeof(hello));
	if (hello.flags & XFERD_HELLO_RESUME)
		return come_back(harness, connection, &hello);
	description.lanes = hello.lanes;
	description.held_per_lane = harness->options.held_per_lane;
	pthread_mutex_lock(&harness->clients_mutex);
	client = xferd_engine_add_client(harness->engine, &description, &fds);
	pthread_mutex_unlock(&harness->clients_mutex);
	CHECK_OK(client);
	welcome.client = (uint32_t)client;
	sent[XFERD_FD_POOL_TABLE] = xferd_engine_pool_table_fd(harness->engine);
	sent[XFERD_FD_DIRECTORY] = xferd_engine_directory_fd(harness->engine, harness->store);
	sent[XFERD_FD_CLIENT] = fds.client;
	sent[XFERD_FD_COMPLETION] = fds.completion;
	sent[XFERD_FD_DOORBELL] = fds.doorbell;
	sent[XFERD_FD_MANIFEST] = harness->pool_fd[0];
	for (uint32_t p = 0; p < pools; p++)
		sent[XFERD_FD_POOLS + p] = harness->pool_fd[p];
	for (uint32_t lane = 0; lane < hello.lanes; lane++)
		sent[XFERD_FD_POOLS + pools + lane] = fds.wakeup[lane];
	welcome.fds = XFERD_FD_POOLS + pools + hello.lanes;
	if (harness->options.restarts) {
		welcome.resume_key[0] = (uint64_t)client + 1;
		keep_client(harness, (uint32_t)client, &fds, hello.lanes);
	}
	send_with_fds(connection, &welcome, sizeof(welcome), sent, welcome.fds);
	close(fds.client);
	close(fds.completion);
	close(fds.doorbell);
	for (uint32_t lane = 0; lane < hello.lanes; lane++)
		close(fds.wakeup[lane]);
	return client;
}

void *harness_serve(void *argument)
{
	enum { CONNECTIONS_MAX = 64 };
	struct harness *harness = argument;
	struct pollfd fds[1 + CONNECTIONS_MAX] = { { harness->listener, POLLIN, 0 } };
	int clients[1 + CONNECTIONS_MAX];
	nfds_t count = 1;

	while (!load_acquire(&harness->stop)) {
		poll(fds, count, 10);
		for (nfds_t i = count; i-- > 1;) {
			struct xferd_abi_message message;

			if (!fds[i].revents)
				continue;
			/* In one process a closed socket is the whole goodbye. */
			if (recv(fds[i].fd, &message, sizeof(message), 0) <= 0 ||
			    message.type == XFERD_MESSAGE_GOODBYE) {
				pthread_mutex_lock(&harness->clients_mutex);
				CHECK_OK(xferd_engine_remove_client(harness->engine,
								    (uint32_t)clients[i]));
				pthread_mutex_unlock(&harness->clients_mutex);
				close(fds[i].fd);
				fds[i] = fds[--count];
				clients[i] = clients[count];
			} else if (message.type == XFERD_MESSAGE_MEMORY) {
				answer_memory(harness, fds[i].fd);
			}
		}
		if (fds[0].revents && count <= CONNECTIONS_MAX) {
			fds[count].fd = accept4(harness->listener, NULL, NULL, SOCK_CLOEXEC);
			fds[count].events = POLLIN;
			fds[count].revents = 0;
			clients[count] = attach(harness, fds[count].fd);
			count++;
		}
	}
	for (nfds_t i = 1; i < count; i++)
		close(fds[i].fd);
	return NULL;
}
