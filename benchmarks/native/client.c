/* A load generator that is never the bottleneck: streams held open, their tokens' delays counted.
 *
 *   client PORT STREAMS RAMP_S SETTLE_S WINDOW_S MAX_TOKENS
 *
 * Writes `begin` and `end` at the ends of the window, in which all streams are open, and then one
 * line of JSON: tokens, reads, the delay's quantiles, and its median by thirds of the window. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

enum { KEPT = 1024, READ_BYTES = 65536 };

static struct stream { char kept[KEPT]; int size, headed, begun; } *streams;
static int fds[65536], begun;
static float *delays[3];
static long counts[3], room[3], reads;
static long long begin_ns, window_ns;

static long long now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void count(long long arrival, long long stamp) {
  int third = (arrival - begin_ns) * 3 / window_ns;
  if (third > 2) third = 2;
  if (counts[third] == room[third]) {
    room[third] = room[third] ? 2 * room[third] : 65536;
    delays[third] = realloc(delays[third], room[third] * sizeof(float));
  }
  delays[third][counts[third]++] = (arrival - stamp) / 1e6;
}

static void fail(const char *what, const char *seen) {
  printf("{\"fault\": \"%s\"}\n", what);
  fprintf(stderr, "%s: %.1000s\n", what, seen);
  exit(1);
}

static void take(int index, int fd, int counting) {
  static char buffer[READ_BYTES + KEPT + 1];
  struct stream *s = &streams[index];
  memcpy(buffer, s->kept, s->size);
  ssize_t got = read(fd, buffer + s->size, READ_BYTES);
  if (got < 0 && errno == EAGAIN) return;
  if (got <= 0) fail("a stream was cut", s->kept);
  long long now = now_ns();
  char *end = buffer + s->size + got, *at = buffer, *found;
  *end = 0;
  if (!s->headed && end - buffer > 12) {
    if (memcmp(buffer, "HTTP/1.1 200", 12)) fail("a stream was refused", buffer);
    s->headed = 1;
  }
  int tokens = 0;
  while ((found = memmem(at, end - at, "\" @", 3))) {
    char *rest;
    long long stamp = strtoll(found + 3, &rest, 10);
    if (rest == end) break;
    at = rest;
    tokens++;
    if (counting) count(now, stamp);
  }
  if (tokens && !s->begun) s->begun = 1, begun++;
  if (tokens && counting) reads++;
  /* An event whose stamp isn't whole is looked at again. */
  char *keep = found ? found : end - 2 > at ? end - 2 : at;
  if (end - keep > KEPT) keep = end - KEPT;
  s->size = end - keep;
  memmove(s->kept, keep, s->size);
}

static int order(const void *a, const void *b) {
  float x = *(const float *)a, y = *(const float *)b;
  return (x > y) - (x < y);
}

static double share(float *values, long size, double of) {
  return size ? values[(long)(of * (size - 1))] : 0;
}

int main(int count_, char **words) {
  if (count_ != 7) return 2;
  int port = atoi(words[1]), wanted = atoi(words[2]), one = 1, opened = 0, poll = epoll_create1(0);
  double ramp_s = atof(words[3]), settle_s = atof(words[4]);
  window_ns = atof(words[5]) * 1e9;
  setvbuf(stdout, NULL, _IOLBF, 0);
  streams = calloc(wanted, sizeof *streams);
  struct sockaddr_in there = {AF_INET, htons(port), {htonl(INADDR_LOOPBACK)}, {0}};
  long long start = now_ns(), all_ns = 0;
  int phase = 0; /* 0: opening, 1: settling, 2: counting */
  for (;;) {
    long long now = now_ns();
    while (opened < wanted && now - start >= ramp_s * 1e9 * opened / wanted) {
      int fd = socket(AF_INET, SOCK_STREAM, 0);
      if (connect(fd, (void *)&there, sizeof there)) fail("can't connect", "");
      setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
      char body[400], request[800];
      int size = sprintf(body, "{\"stream\":true,\"model\":\"simulated\",\"max_tokens\":%s,\"messages\":"
                         "[{\"role\":\"user\",\"content\":\"mark busy %d \"}]}", words[6], opened);
      size = sprintf(request, "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\n"
                     "content-type: application/json\r\ncontent-length: %d\r\n\r\n%s", port, size, body);
      if (write(fd, request, size) != size) fail("can't ask", "");
      fds[opened] = fd;
      struct epoll_event event = {EPOLLIN, {.u32 = opened++}};
      epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event);
    }
    if (phase == 0 && begun == wanted) phase = 1, all_ns = now;
    if (phase == 0 && now - start > (ramp_s + 30) * 1e9) fail("streams haven't begun", "");
    if (phase == 1 && now - all_ns >= settle_s * 1e9) phase = 2, begin_ns = now, puts("begin");
    if (phase == 2 && now - begin_ns >= window_ns) break;
    struct epoll_event events[256];
    int ready = epoll_wait(poll, events, 256, 1);
    for (int i = 0; i < ready; i++)
      take(events[i].data.u32, fds[events[i].data.u32], phase == 2);
  }
  puts("end");
  double thirds[3];
  long total = counts[0] + counts[1] + counts[2], at = 0;
  float *all = malloc((total + 1) * sizeof(float));
  for (int i = 0; i < 3; i++) {
    if (counts[i]) qsort(delays[i], counts[i], sizeof(float), order);
    thirds[i] = share(delays[i], counts[i], 0.5);
    if (counts[i]) memcpy(all + at, delays[i], counts[i] * sizeof(float));
    at += counts[i];
  }
  qsort(all, total, sizeof(float), order);
  printf("{\"tokens\": %ld, \"reads\": %ld, \"p50_ms\": %.3f, \"p95_ms\": %.3f, \"p99_ms\": %.3f, "
         "\"first_third_ms\": %.3f, \"last_third_ms\": %.3f}\n", total, reads, share(all, total, 0.5),
         share(all, total, 0.95), share(all, total, 0.99), thirds[0], thirds[2]);
  fflush(stdout);
  sleep(60); /* Its streams stay open until it is ended, so that nothing else happens meanwhile. */
}
