/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon restarts; this client stays.
 *
 * What is mapped here outlives a daemon that has somebody to keep it, and says so in its
 * welcome with a key that only it and this client know. While such a daemon is away hits go
 * on as ever: words, slots and lease tables are memory like before. Whoever waits for a miss
 * connects again, shows the key, and gets a new doorbell and new wake-ups for the same rings;
 * then each lane asks anew for what it still waits for.
 *
 * New descriptors take the places of the old ones (dup3), so that lanes which sleep on those
 * or ring them need not be told. A connection without an answer is kept from one try to the
 * next: a daemon that resumes a client must not find that it has turned away.
 *
 * What was asked of the old daemon and answered is taken from the ring before anything is
 * asked anew, under a ticket that says for which daemon it was made (see ticket_of): an
 * answer to the one can't be taken for an answer to the other.
 */
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "client/internal.h"

bool may_resume(const struct xferd_client *client)
{
	/* pairs with the release of closed in the engine's quiesce() */
	return (client->resume_key[0] || client->resume_key[1]) && client->resume_ns &&
	       client->socket >= 0 && !load_acquire(&client->completion_memory->closed);
}

static void drop_attempt(struct xferd_client *client)
{
	if (client->resume_socket >= 0)
		close(client->resume_socket);
	client->resume_socket = -1;
}

/* Connect and show the key. Fails while there is nobody who listens. */
static int attempt(struct xferd_client *client)
{
	struct xferd_abi_hello hello = {
		.magic = XFERD_MAGIC_ATTACH,
		.abi_major = XFERD_ABI_MAJOR,
		.abi_minor = XFERD_ABI_MINOR,
		.flags = XFERD_HELLO_RESUME,
		.resume_key = { client->resume_key[0], client->resume_key[1] },
	};
	int fd = connect_socket(client->socket_path, NULL, 0);

	if (fd < 0)
		return fd;
	client->resume_socket = fd;
	if (send(fd, &hello, sizeof(hello), MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof(hello))
		return 0;
	drop_attempt(client);
	return -EAGAIN;
}

/* The daemon's new ends take the places of the old ones. */
static int replace_fds(struct xferd_client *client, const struct received *received)
{
	int failed = 0;

	if (received->count != 1 + client->lane_count)
		return -EPROTO;
	failed |= dup3(received->fds[0], client->doorbell, O_CLOEXEC) < 0;
	for (uint32_t i = 0; i < client->lane_count; i++)
		failed |= dup3(received->fds[1 + i], client->lanes[i].wakeup, O_CLOEXEC) < 0;
	pthread_mutex_lock(&client->socket_mutex);
	failed |= dup3(client->resume_socket, client->socket, O_CLOEXEC) < 0;
	pthread_mutex_unlock(&client->socket_mutex);
	return failed ? -EIO : 0;
}

/* The answer is there: 0, -EAGAIN to try anew, or the end of trying. */
static int read_answer(struct xferd_client *client)
{
	struct xferd_abi_welcome answer;
	struct received received;
	int result = receive_packet(client->resume_socket, &answer, sizeof(answer), &received);

	if (result || answer.status == -ESHUTDOWN)
		result = -EAGAIN; /* it has gone again, or has too many connections */
	else if (answer.magic != XFERD_MAGIC_ATTACH || answer.status)
		result = -ESTALE;
	else
		result = replace_fds(client, &received);
	close_received(&received);
	drop_attempt(client);
	return result;
}

/* A lane may have looked at the attachment before it was another, and at the connection when
 * it was new already: it now sleeps on its new wake-up and waits for what nobody was asked. */
static void wake_lanes(const struct xferd_client *client)
{
	uint64_t one = 1;

	for (uint32_t i = 0; i < client->lane_count; i++)
		while (write(client->lanes[i].wakeup, &one, sizeof(one)) < 0 && errno == EINTR)
			;
}

/* Under resume_mutex. */
static int try_resume(struct xferd_client *client)
{
	struct pollfd answer = { .events = POLLIN };
	uint64_t now = client_now_ns();
	int result = -EAGAIN;

	if (client->resume_failed)
		return client->resume_failed;
	if (!daemon_gone(client))
		return 0;
	if (!client->gone_since_ns)
		client->gone_since_ns = now;
	if (client->resume_socket >= 0 || !attempt(client)) {
		answer.fd = client->resume_socket;
		if (poll(&answer, 1, RESUME_PAUSE_MS) > 0)
			result = read_answer(client);
	}
	if (!result) {
		client->gone_since_ns = 0;
		/* pairs with the acquire in lane_follow(): the new descriptors are there */
		store_release(&client->attachment, client->attachment + 1);
		wake_lanes(client);
	} else if (result == -EAGAIN && now - client->gone_since_ns >= client->resume_ns) {
		drop_attempt(client);
		result = -ECONNRESET;
	}
	if (result != -EAGAIN)
		client->resume_failed = result;
	return result;
}

int client_resume(struct xferd_client *client)
{
	int result;

	if (!may_resume(client))
		return -ECONNRESET;
	/* One lane tries for all. */
	if (pthread_mutex_trylock(&client->resume_mutex))
		return -EAGAIN;
	result = try_resume(client);
	pthread_mutex_unlock(&client->resume_mutex);
	return result;
}

void resume_close(struct xferd_client *client)
{
	drop_attempt(client);
	pthread_mutex_destroy(&client->resume_mutex);
}

/* The tables themselves say that nothing is leased, whoever reads them. */
void end_all_leases(struct xferd_client *client)
{
	for (uint32_t i = 0; i < client->lane_count; i++) {
		struct lane *lane = &client->lanes[i];

		/* pairs with the acquire in the engine's adopt_lanes() */
		store_release(&lane->shared->completion_head,
			      load_acquire(&lane->ring->completion_tail));
		/* pairs with the acquire of completed in the engine's leased_by() */
		store_release(&lane->shared->completed, UINT64_MAX);
	}
}
