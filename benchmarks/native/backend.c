/* A backend that is never the bottleneck: streams in steps, stamped, one write each; on one core.
 *
 *   backend PORT STEP_MS
 *
 * Its answers are the simulated engine's. A prompt holds a word and a number, `mark <kind> <n>`:
 * `busy` has a token in each step, `quiet` one token and then none, `prefill` nothing at all. For a
 * client that leaves, `gone <n> <ns>` is written, with CLOCK_MONOTONIC. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 16384, REQUEST_BYTES = 16384 };
enum kind { NONE, BUSY, QUIET, PREFILL };

static struct stream {
  char *request;
  int size;
  enum kind kind;
  long mark, left;
  int begun;
} streams[MOST];
static int highest;

static const char HEAD[] =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    "transfer-encoding: chunked\r\n\r\n";
static const char EVENT[] =
    "data: {\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion.chunk\","
    "\"created\":1700000000,\"model\":\"simulated\",\"choices\":[{\"index\":0,\"delta\":{%s\"content\":"
    "\" @%lld\"},\"logprobs\":null,\"finish_reason\":%s,\"token_ids\":null}]}\n\n";
static const char END[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
static const char MODELS[] =
    "{\"object\":\"list\",\"status\":\"ok\",\"model_path\":\"simulated\",\"data\":[{\"id\":\"simulated\","
    "\"object\":\"model\",\"created\":1700000000,\"owned_by\":\"vllm\",\"max_model_len\":32768}]}";

static long long now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void gone(int fd) {
  struct stream *s = &streams[fd];
  if (s->kind != NONE) printf("gone %ld %lld\n", s->mark, now_ns());
  free(s->request);
  memset(s, 0, sizeof *s);
  close(fd);
}

static int chunk(char *to, const char *role, long long stamp, const char *finish) {
  char event[600];
  int size = sprintf(event, EVENT, role, stamp, finish);
  return sprintf(to, "%x\r\n%s\r\n", size, event);
}

/* A token, and the end with the last one. */
static void step(int fd, long long stamp, const char *common, int size) {
  struct stream *s = &streams[fd];
  char own[2000];
  int at = 0;
  if (!s->begun || s->left == 1) {
    if (!s->begun) {
      at = sprintf(own, "%s", HEAD);
      at += chunk(own + at, "\"role\":\"assistant\",", stamp, s->left == 1 ? "\"stop\"" : "null");
    } else {
      at = chunk(own, "", stamp, "\"stop\"");
    }
    if (s->left == 1) at += sprintf(own + at, "%s", END);
    common = own, size = at;
  }
  s->begun = 1;
  if (s->left-- == 1) s->kind = NONE, s->begun = 0;
  else if (s->kind == QUIET && s->left > 0) s->left = -1;
  if (write(fd, common, size) != size && errno != EAGAIN) gone(fd);
}

static long field(const char *body, const char *name, long otherwise) {
  const char *at = strstr(body, name);
  if (!at) return otherwise;
  at += strlen(name);
  while (*at == ' ' || *at == ':') at++;
  return strtol(at, NULL, 10);
}

static void answer(int fd, const char *head, const char *body) {
  struct stream *s = &streams[fd];
  if (strncmp(head, "POST ", 5) || !strstr(body, "\"messages\"")) {
    char reply[600];
    int size = sprintf(reply, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                       "content-length: %zu\r\n\r\n%s", strlen(MODELS), MODELS);
    if (write(fd, reply, size) < 0 || strstr(head, "HTTP/1.0")) gone(fd);
    return;
  }
  s->left = field(body, "\"max_tokens\"", 16);
  const char *mark = strstr(body, "mark ");
  mark = mark ? mark + 5 : "busy 0";
  s->kind = *mark == 'q' ? QUIET : *mark == 'p' ? PREFILL : BUSY;
  s->mark = field(mark, " ", 0);
  if (s->kind != PREFILL) step(fd, now_ns(), NULL, 0);
}

static void readable(int fd) {
  struct stream *s = &streams[fd];
  if (!s->request) s->request = malloc(REQUEST_BYTES);
  ssize_t got = read(fd, s->request + s->size, REQUEST_BYTES - 1 - s->size);
  if (got < 0 && errno == EAGAIN) return;
  if (got <= 0) {
    gone(fd);
    return;
  }
  s->size += got;
  s->request[s->size] = 0;
  char *end = strstr(s->request, "\r\n\r\n");
  if (!end) return;
  char *length = strcasestr(s->request, "content-length:");
  long body = length && length < end ? strtol(length + 15, NULL, 10) : 0;
  if (s->size < end + 4 - s->request + body) return;
  char *request = s->request;
  s->request = NULL, s->size = 0;
  answer(fd, request, end + 4);
  free(request);
}

int main(int count, char **words) {
  if (count != 3) return 2;
  signal(SIGPIPE, SIG_IGN);
  setvbuf(stdout, NULL, _IOLBF, 0);
  long long every_ns = atof(words[2]) * 1e6;
  int one = 1, poll = epoll_create1(0), listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  struct sockaddr_in here = {AF_INET, htons(atoi(words[1])), {htonl(INADDR_LOOPBACK)}, {0}};
  if (bind(listener, (void *)&here, sizeof here) || listen(listener, 8192)) return 1;
  int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
  struct timespec pace = {every_ns / 1000000000, every_ns % 1000000000};
  timerfd_settime(timer, 0, &(struct itimerspec){pace, pace}, NULL);
  struct epoll_event event = {EPOLLIN, {.fd = listener}}, events[256];
  epoll_ctl(poll, EPOLL_CTL_ADD, listener, &event);
  event.data.fd = timer;
  epoll_ctl(poll, EPOLL_CTL_ADD, timer, &event);
  for (;;) {
    int ready = epoll_wait(poll, events, 256, -1);
    for (int i = 0; i < ready; i++) {
      int fd = events[i].data.fd;
      if (fd == listener) {
        while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
          if (fd >= MOST) { close(fd); continue; }
          if (fd > highest) highest = fd;
          setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
          event.data.fd = fd;
          epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event);
        }
      } else if (fd == timer) {
        uint64_t passed;
        if (read(timer, &passed, sizeof passed) < 0) continue;
        char common[700];
        long long stamp = now_ns();
        int size = chunk(common, "", stamp, "null");
        for (int s = 0; s <= highest; s++)
          if ((streams[s].kind == BUSY || streams[s].kind == QUIET) && streams[s].left > 0)
            step(s, stamp, common, size);
      } else {
        readable(fd);
      }
    }
  }
}
