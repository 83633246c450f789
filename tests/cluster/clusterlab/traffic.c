/* traffic: makes and takes UDP and TCP of known size, and prints what its sockets saw, a line of JSON per exchange.
 *
 *     traffic serve PORT...                      both protocols, both families, until SIGTERM
 *     traffic udp ADDRESS PORT COUNT SIZE REPLY  COUNT datagrams of SIZE bytes, each answered by REPLY bytes (0: never)
 *     traffic tcp ADDRESS PORT UP DOWN           UP bytes there, then DOWN bytes back (DOWN "any": whatever comes)
 *     traffic flow FILE SIZE REPLY               while FILE is there: datagrams to each `ADDRESS PORT` in it, 15 a second,
 *                                                each asking for an answer, and waiting for none; prints nothing
 *     traffic pause                              nothing, until SIGTERM (which PID 1 of a container would ignore)
 *
 * The client asks for its answers in the first bytes of what it sends, so SIZE is at least 8 and UP at least 16, or no
 * bytes at all. Exit code 1 where an answer did not come, 2 for wrong arguments.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <endian.h>
#include <err.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MOST_PORTS = 16, MOST_PEERS = 1024, MOST_BYTES = 65507, PATIENCE_S = 10, MOST_TARGETS = 32, PACE_US = 50000 };
static const uint32_t FORGET = UINT32_MAX; /* as `left`: nobody wants to know what was sent to this peer */

struct question { /* of UDP, network order */
    uint32_t reply, left;
};
struct order { /* of TCP, network order */
    uint64_t up, down;
};
struct peer {
    struct sockaddr_in6 address;
    uint64_t got, got_bytes, sent, sent_bytes;
};

static char buffer[1 << 16];
static struct peer peers[MOST_PEERS];

static void leave(int signal) { (void)signal; _exit(0); }

static const char *text(const struct sockaddr_in6 *address) {
    static char name[INET6_ADDRSTRLEN];
    inet_ntop(AF_INET6, &address->sin6_addr, name, sizeof name);
    return IN6_IS_ADDR_V4MAPPED(&address->sin6_addr) ? name + strlen("::ffff:") : name;
}

static void say(const char *protocol, const struct sockaddr_in6 *peer, uint64_t sent, uint64_t received) {
    printf("{\"protocol\": \"%s\", \"peer\": \"%s\", \"port\": %d, \"sent\": %" PRIu64 ", \"received\": %" PRIu64 "}\n",
           protocol, text(peer), ntohs(peer->sin6_port), sent, received);
    fflush(stdout);
}

static int ear(int kind, int port) {
    struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_port = htons(port), .sin6_addr = IN6ADDR_ANY_INIT};
    int end = socket(AF_INET6, kind, 0), no = 0, yes = 1;
    if (end < 0) err(1, "socket");
    setsockopt(end, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
    setsockopt(end, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    setsockopt(end, IPPROTO_IPV6, IPV6_RECVPKTINFO, &yes, sizeof yes);
    if (bind(end, (struct sockaddr *)&any, sizeof any) || (kind == SOCK_STREAM && listen(end, 64)))
        err(1, "port %d", port);
    return end;
}

static struct peer *known(const struct sockaddr_in6 *address) {
    struct peer *fresh = NULL;
    for (struct peer *one = peers; one < peers + MOST_PEERS; one++) {
        if (one->address.sin6_port == address->sin6_port &&
            !memcmp(&one->address.sin6_addr, &address->sin6_addr, sizeof address->sin6_addr))
            return one;
        if (!one->address.sin6_port && !fresh) fresh = one;
    }
    if (!fresh) errx(1, "more than %d peers at once", MOST_PEERS);
    fresh->address = *address;
    return fresh;
}

/* The answer leaves with the address that was asked: a host has several, and a client that is connected takes only one. */
static void answer(int end) {
    static char question[1 << 16], control[CMSG_SPACE(sizeof(struct in6_pktinfo))];
    struct sockaddr_in6 from;
    struct iovec data = {question, sizeof question};
    struct msghdr message = {.msg_name = &from, .msg_namelen = sizeof from, .msg_iov = &data, .msg_iovlen = 1,
                             .msg_control = control, .msg_controllen = sizeof control};
    ssize_t size = recvmsg(end, &message, 0);
    if (size < (ssize_t)sizeof(struct question)) return;
    struct question asked;
    memcpy(&asked, question, sizeof asked);
    struct peer *peer = known(&from);
    peer->got++;
    peer->got_bytes += size;
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    if (head && !IN6_IS_ADDR_LINKLOCAL(&from.sin6_addr)) ((struct in6_pktinfo *)CMSG_DATA(head))->ipi6_ifindex = 0;
    data.iov_base = buffer;
    data.iov_len = ntohl(asked.reply);
    if (data.iov_len && data.iov_len <= MOST_BYTES && sendmsg(end, &message, 0) == (ssize_t)data.iov_len)
        peer->sent++, peer->sent_bytes += data.iov_len;
    if (asked.left && ntohl(asked.left) != FORGET) return;
    if (!asked.left) say("udp", &from, peer->sent_bytes, peer->got_bytes);
    memset(peer, 0, sizeof *peer);
}

static uint64_t take(int end, uint64_t most) {
    uint64_t total = 0;
    while (total < most) {
        ssize_t size = recv(end, buffer, most - total < sizeof buffer ? most - total : sizeof buffer, 0);
        if (size <= 0) break;
        total += size;
    }
    return total;
}

static uint64_t give(int end, uint64_t size) {
    static const char nothing[1 << 16];
    uint64_t total = 0;
    while (total < size) {
        size_t part = size - total < sizeof nothing ? size - total : sizeof nothing;
        ssize_t sent = send(end, nothing, part, MSG_NOSIGNAL);
        if (sent <= 0) break;
        total += sent;
    }
    return total;
}

static void welcome(int listener) {
    struct sockaddr_in6 from;
    socklen_t length = sizeof from;
    int end = accept(listener, (struct sockaddr *)&from, &length);
    if (end < 0) return;
    if (fork()) {
        close(end);
        return;
    }
    struct order order;
    if (recv(end, &order, sizeof order, MSG_WAITALL) == sizeof order) {
        uint64_t up = be64toh(order.up), down = be64toh(order.down);
        uint64_t got = sizeof order + take(end, up - sizeof order);
        say("tcp", &from, give(end, down), got);
    }
    _exit(0);
}

static void serve(char **ports) {
    struct pollfd ears[2 * MOST_PORTS];
    int number = 0;
    signal(SIGCHLD, SIG_IGN);
    for (; *ports && number < 2 * MOST_PORTS; ports++, number += 2) {
        ears[number] = (struct pollfd){ear(SOCK_DGRAM, atoi(*ports)), POLLIN, 0};
        ears[number + 1] = (struct pollfd){ear(SOCK_STREAM, atoi(*ports)), POLLIN, 0};
    }
    for (;;) {
        poll(ears, number, -1);
        for (int each = 0; each < number; each++)
            if (ears[each].revents) (each % 2 ? welcome : answer)(ears[each].fd);
    }
}

static int reach(int kind, const char *address, const char *port, struct sockaddr_in6 *peer) {
    char mapped[INET6_ADDRSTRLEN + 8];
    snprintf(mapped, sizeof mapped, "%s%s", strchr(address, ':') ? "" : "::ffff:", address);
    *peer = (struct sockaddr_in6){.sin6_family = AF_INET6, .sin6_port = htons(atoi(port))};
    if (inet_pton(AF_INET6, mapped, &peer->sin6_addr) != 1) errx(2, "no address: %s", address);
    int end = socket(AF_INET6, kind, 0);
    struct timeval patience = {PATIENCE_S, 0};
    setsockopt(end, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(end, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (end < 0 || connect(end, (struct sockaddr *)peer, sizeof *peer)) err(1, "%s port %s", address, port);
    return end;
}

static int udp(char **argument) {
    struct sockaddr_in6 peer;
    uint32_t count = atoi(argument[2]), size = atoi(argument[3]), reply = atoi(argument[4]);
    if (size < sizeof(struct question) || size > MOST_BYTES || !count) errx(2, "SIZE is 8 to %d", MOST_BYTES);
    int end = reach(SOCK_DGRAM, argument[0], argument[1], &peer);
    uint64_t sent = 0, received = 0;
    for (uint32_t left = count; left--;) {
        struct question question = {htonl(reply), htonl(left)};
        memcpy(buffer, &question, sizeof question);
        ssize_t part = send(end, buffer, size, 0);
        if (part > 0) sent += part;
        if (reply && (part = recv(end, buffer, sizeof buffer, 0)) > 0) received += part;
        if (!reply) usleep(500); /* a burst would overflow the receiver's buffer */
    }
    say("udp", &peer, sent, received);
    return sent != (uint64_t)count * size || received != (uint64_t)count * reply;
}

static int targets(const char *path, int *ends) {
    char address[INET6_ADDRSTRLEN], port[8];
    struct sockaddr_in6 peer;
    int number = 0;
    FILE *file = fopen(path, "r");
    while (file && number < MOST_TARGETS && fscanf(file, "%45s %7s", address, port) == 2)
        ends[number++] = reach(SOCK_DGRAM, address, port, &peer);
    if (file) fclose(file);
    return number;
}

/* Sockets live for a second: so each NAT of a node is met by new flows as well as by known ones. */
static void flow(char **argument) {
    struct question question = {htonl(atoi(argument[2])), htonl(FORGET)};
    size_t size = atoi(argument[1]);
    int ends[MOST_TARGETS];
    if (size < sizeof question || size > MOST_BYTES) errx(2, "SIZE is 8 to %d", MOST_BYTES);
    memcpy(buffer, &question, sizeof question);
    for (;;) {
        int number = targets(argument[0], ends);
        for (int round = 0; round < 20; round++) {
            /* in the last rounds answers come, and find a socket */
            for (int each = 0; each < number; each++)
                if (round < 15 && !access(argument[0], F_OK)) send(ends[each], buffer, size, MSG_DONTWAIT);
            usleep(PACE_US);
        }
        while (number--) close(ends[number]);
    }
}

static int tcp(char **argument) {
    struct sockaddr_in6 peer;
    int any = !strcmp(argument[3], "any");
    uint64_t up = strtoull(argument[2], NULL, 10), down = any ? 0 : strtoull(argument[3], NULL, 10);
    if (up < sizeof(struct order)) errx(2, "UP is at least 16");
    int end = reach(SOCK_STREAM, argument[0], argument[1], &peer);
    struct order order = {htobe64(up), htobe64(down)};
    uint64_t sent = send(end, &order, sizeof order, MSG_NOSIGNAL);
    sent += give(end, up - sizeof order);
    uint64_t received = take(end, UINT64_MAX);
    close(end);
    say("tcp", &peer, sent, received);
    return !any && (sent != up || received != down);
}

int main(int number, char **argument) {
    signal(SIGTERM, leave);
    if (number > 2 && !strcmp(argument[1], "serve")) serve(argument + 2);
    if (number == 7 && !strcmp(argument[1], "udp")) return udp(argument + 2);
    if (number == 6 && !strcmp(argument[1], "tcp")) return tcp(argument + 2);
    if (number == 5 && !strcmp(argument[1], "flow")) flow(argument + 2);
    if (number == 2 && !strcmp(argument[1], "pause"))
        for (;;) pause();
    fprintf(stderr, "usage: traffic serve PORT... | udp ADDRESS PORT COUNT SIZE REPLY | tcp ADDRESS PORT UP DOWN"
                    " | flow FILE SIZE REPLY | pause\n");
    return 2;
}
