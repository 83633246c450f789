/* blast: sends UDP over IPv4 as fast as one CPU can, and prints what that took.
 *
 *     blast CPU SIZE WARM COUNT PORT ROUTES
 *
 * Pins itself to CPU and sends WARM + COUNT datagrams of SIZE bytes of payload to PORT, 64 to a system call. ROUTES is
 * a file of lines "SOURCE DESTINATION", used in turn; SOURCE may be "-", for the address that the kernel picks. One
 * line makes a connected socket, which is what a busy sender has. Prints "COUNT CPU WALL": the datagrams after the warm
 * ones, and the nanoseconds of this process's CPU time and of the clock that they took, the kernel's part included:
 * a veth hands the packet on in the sender's own context. Any error ends it with exit code 1.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <err.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

enum { BATCH = 64, MOST_ROUTES = 1 << 16, MOST_BYTES = 65507 };

struct control {
    struct cmsghdr header;
    struct in_pktinfo info;
};

static struct sockaddr_in destinations[MOST_ROUTES];
static struct control controls[MOST_ROUTES];
static char payload[MOST_BYTES];

static long long nanoseconds(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void pin(int cpu)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    if (sched_setaffinity(0, sizeof one, &one))
        err(1, "CPU %d", cpu);
}

static int load_routes(const char *path, int port)
{
    char source[64], destination[64];
    int routes = 0;
    FILE *file = fopen(path, "r");
    if (!file)
        err(1, "%s", path);
    while (routes < MOST_ROUTES && fscanf(file, "%63s %63s", source, destination) == 2) {
        struct control *control = &controls[routes];
        control->header.cmsg_len = CMSG_LEN(sizeof control->info);
        control->header.cmsg_level = IPPROTO_IP;
        control->header.cmsg_type = IP_PKTINFO;
        destinations[routes].sin_family = AF_INET;
        destinations[routes].sin_port = htons(port);
        if ((strcmp(source, "-") && inet_pton(AF_INET, source, &control->info.ipi_spec_dst) != 1) ||
            inet_pton(AF_INET, destination, &destinations[routes].sin_addr) != 1)
            errx(1, "%s:%d: not two IPv4 addresses", path, routes + 1);
        routes++;
    }
    fclose(file);
    if (!routes)
        errx(1, "%s: no route", path);
    return routes;
}

static int open_socket(int routes)
{
    int buffer = 4 << 20, fd = socket(AF_INET, SOCK_DGRAM, 0);
    if (fd < 0)
        err(1, "socket");
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
    if (routes == 1) {
        struct sockaddr_in local = {.sin_family = AF_INET, .sin_addr = controls[0].info.ipi_spec_dst};
        if (bind(fd, (struct sockaddr *)&local, sizeof local))
            err(1, "bind");
        if (connect(fd, (struct sockaddr *)&destinations[0], sizeof destinations[0]))
            err(1, "connect");
    }
    return fd;
}

static void send_all(int fd, struct mmsghdr *messages, int routes, long count)
{
    static int next;
    for (long sent = 0; sent < count;) {
        int batch = count - sent < BATCH ? (int)(count - sent) : BATCH;
        for (int i = 0; routes > 1 && i < batch; i++) {
            struct msghdr *header = &messages[i].msg_hdr;
            int route = (next + i) % routes;
            header->msg_name = &destinations[route];
            header->msg_namelen = sizeof destinations[route];
            header->msg_control = &controls[route];
            header->msg_controllen = CMSG_SPACE(sizeof controls[route].info);
        }
        int accepted = sendmmsg(fd, messages, batch, 0);
        if (accepted < 0)
            err(1, "sendmmsg after %ld datagrams", sent);
        next = (next + accepted) % routes;
        sent += accepted;
    }
}

int main(int argc, char **argv)
{
    if (argc != 7)
        errx(2, "usage: blast CPU SIZE WARM COUNT PORT ROUTES");
    int size = atoi(argv[2]), routes = load_routes(argv[6], atoi(argv[5]));
    long warm = atol(argv[3]), count = atol(argv[4]);
    if (size < 0 || size > MOST_BYTES)
        errx(2, "SIZE is 0 to %d", MOST_BYTES);
    pin(atoi(argv[1]));

    struct iovec bytes = {payload, size};
    struct mmsghdr messages[BATCH];
    memset(messages, 0, sizeof messages);
    for (int i = 0; i < BATCH; i++) {
        messages[i].msg_hdr.msg_iov = &bytes;
        messages[i].msg_hdr.msg_iovlen = 1;
    }
    int fd = open_socket(routes);
    send_all(fd, messages, routes, warm);
    long long wall = nanoseconds(CLOCK_MONOTONIC), cpu = nanoseconds(CLOCK_PROCESS_CPUTIME_ID);
    send_all(fd, messages, routes, count);
    cpu = nanoseconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    wall = nanoseconds(CLOCK_MONOTONIC) - wall;
    printf("%ld %lld %lld\n", count, cpu, wall);
    return 0;
}
