/* A libnccl.so.2 for ranks that are threads of one process: what cupy's module calls, on the host's
 * memory. A group's messages are delivered when it ends, which waits for the other ranks'.
 *
 * As NCCL 2.30, it takes several ranks on a GPU only with NCCL_MULTI_RANK_GPU_ENABLE=1.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, SYSTEM = 2, ARGUMENT = 4, USAGE = 5, REMOTE = 6, MOST = 8, SECONDS = 30 };
typedef struct { char bytes[128]; } unique_id;
typedef struct letter { struct letter *next; int from, to; size_t size; char data[]; } letter;
typedef struct clique {
  struct clique *next, *parts[MOST];
  char id[128];
  int size, joined, aborted, arrived, left, color[MOST], key[MOST];
  const void *terms[MOST];
  letter *letters;
} clique;
typedef struct { clique *all; int rank; } *communicator;
typedef struct { int kind, peer, type; const void *from; void *to; size_t count; communicator who; } message;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static clique *cliques;
static __thread message group[4096];
static __thread int depth, posted;
static long made;

/* Wait, locked, until the value is there; 0 where the clique is aborted or nothing comes. */
#define AWAIT(condition, of)                                           \
  ({                                                                   \
    struct timespec until;                                             \
    clock_gettime(CLOCK_REALTIME, &until);                             \
    until.tv_sec += SECONDS;                                           \
    int late = 0;                                                      \
    while (!(condition) && !(of)->aborted && !late)                    \
      late = pthread_cond_timedwait(&changed, &lock, &until);          \
    (condition) ? 1 : 0;                                               \
  })

static size_t size_of(int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return type >= 0 && type < 10 ? sizes[type] : 0;
}

/* All ranks bring something; the last one acts on it before any goes on. */
static int meet(communicator c, void (*act)(clique *, void *), void *argument) {
  clique *all = c->all;
  if (!AWAIT(all->left == 0, all)) return REMOTE;
  if (++all->arrived == all->size) {
    if (act) act(all, argument);
    all->arrived = 0;
    all->left = all->size;
    pthread_cond_broadcast(&changed);
  } else if (!AWAIT(all->left > 0, all)) {
    return REMOTE;
  }
  all->left--;
  pthread_cond_broadcast(&changed);
  return SUCCESS;
}

static clique *clique_of(const char *id, int size) {
  clique *found = cliques;
  while (found && memcmp(found->id, id, 128)) found = found->next;
  if (!found) {
    found = calloc(1, sizeof *found);
    memcpy(found->id, id, 128);
    found->size = size;
    found->next = cliques;
    cliques = found;
  }
  return found;
}

static communicator rank_of(clique *all, int rank) {
  communicator made_here = calloc(1, sizeof *made_here);
  made_here->all = all;
  made_here->rank = rank;
  return made_here;
}

int ncclGetVersion(int *version) { *version = 23007; return SUCCESS; }
const char *ncclGetErrorString(int code) { return code ? "a pretended error" : "no error"; }
int ncclGetUniqueId(unique_id *id) {
  memset(id, 0, sizeof *id);
  pthread_mutex_lock(&lock);
  memcpy(id->bytes, &(long){++made}, sizeof made);
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

int ncclCommInitRankConfig(communicator *c, int size, unique_id id, int rank, void *config) {
  const char *several = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  if (size < 1 || size > MOST || rank < 0 || rank >= size) return ARGUMENT;
  if (size > 1 && (!several || strcmp(several, "1"))) return USAGE;
  pthread_mutex_lock(&lock);
  *c = rank_of(clique_of(id.bytes, size), rank);
  int result = meet(*c, NULL, NULL);
  pthread_mutex_unlock(&lock);
  return result;
}

static void part(clique *all, void *argument) {
  memset(all->parts, 0, sizeof all->parts);
  for (int rank = 0; rank < all->size; rank++) {
    unique_id id;
    int members = 0, first = rank;
    for (int other = all->size - 1; other >= 0; other--)
      if (all->color[other] == all->color[rank]) members++, first = other;
    memset(&id, 0, sizeof id);
    if (first == rank) memcpy(id.bytes, &(long){++made}, sizeof made);
    all->parts[rank] = first == rank ? clique_of(id.bytes, members) : all->parts[first];
  }
}

int ncclCommSplit(communicator c, int color, int key, communicator *found, void *config) {
  clique *all = c->all;
  pthread_mutex_lock(&lock);
  /* Not before all have taken what they came for the last time. */
  int result = AWAIT(all->left == 0, all) ? SUCCESS : REMOTE;
  all->color[c->rank] = color;
  all->key[c->rank] = key;
  if (!result) result = meet(c, part, NULL);
  if (!result) {
    int place = 0;
    for (int other = 0; other < all->size; other++)
      place += all->color[other] == color &&
               (all->key[other] < key || (all->key[other] == key && other < c->rank));
    *found = rank_of(all->parts[c->rank], place);
    /* None changes its color before all have looked. */
    result = meet(c, NULL, NULL);
  }
  pthread_mutex_unlock(&lock);
  return result;
}

int ncclCommDestroy(communicator c) {
  pthread_mutex_lock(&lock);
  int result = meet(c, NULL, NULL);
  pthread_mutex_unlock(&lock);
  return result;
}
int ncclCommAbort(communicator c) {
  pthread_mutex_lock(&lock);
  c->all->aborted = 1;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}
int ncclCommGetAsyncError(communicator c, int *error) { *error = SUCCESS; return SUCCESS; }
int ncclCommCount(communicator c, int *count) { *count = c->all->size; return SUCCESS; }
int ncclCommCuDevice(communicator c, int *device) { *device = 0; return SUCCESS; }
int ncclCommUserRank(communicator c, int *rank) { *rank = c->rank; return SUCCESS; }

#define ADD(type)                                                                    \
  for (size_t i = 0; i < one->count; i++) {                                          \
    type total = 0;                                                                  \
    for (int rank = 0; rank < all->size; rank++) total += ((const type *)all->terms[rank])[i]; \
    ((type *)sum)[i] = total;                                                        \
  }

static int run(message *one) {
  clique *all = one->who->all;
  size_t size = one->count * size_of(one->type);
  if (one->kind == 0) {
    letter *sent = malloc(sizeof *sent + size);
    *sent = (letter){NULL, one->who->rank, one->peer, size};
    memcpy(sent->data, one->from, size);
    letter **end = &all->letters;
    while (*end) end = &(*end)->next;
    *end = sent;
    pthread_cond_broadcast(&changed);
    return SUCCESS;
  }
  if (one->kind == 1) {
    letter **at;
#define FIND                                                                   \
  ({                                                                           \
    at = &all->letters;                                                        \
    while (*at && ((*at)->from != one->peer || (*at)->to != one->who->rank)) at = &(*at)->next; \
    *at;                                                                       \
  })
    if (!AWAIT(FIND, all)) return REMOTE;
    letter *got = FIND;
    *at = got->next;
    int result = got->size == size ? SUCCESS : USAGE;
    if (!result) memcpy(one->to, got->data, size);
    free(got);
    return result;
  }
  if (!AWAIT(all->left == 0, all)) return REMOTE;
  all->terms[one->who->rank] = one->from;
  int result = meet(one->who, NULL, NULL);
  void *sum = malloc(size);
  if (!result) {
    if (one->type == 7) ADD(float)
    else if (one->type == 8) ADD(double)
    else if (one->type == 4) ADD(long)
    else result = ARGUMENT;
  }
  /* None writes its result, which may be its term, before all have read. */
  int met = meet(one->who, NULL, NULL);
  memcpy(one->to, sum, result ? 0 : size);
  free(sum);
  return result ? result : met;
}

int ncclGroupStart(void) { depth++; return SUCCESS; }
int ncclGroupEnd(void) {
  int result = SUCCESS;
  if (!depth || --depth) return depth ? SUCCESS : USAGE;
  pthread_mutex_lock(&lock);
  for (int kind = 0; kind < 3; kind++)
    for (int i = 0; i < posted && !result; i++)
      if (group[i].kind == kind) result = run(&group[i]);
  pthread_mutex_unlock(&lock);
  posted = 0;
  return result;
}

static int post(message one) {
  if (!size_of(one.type) || one.peer < 0 || one.peer >= one.who->all->size) return ARGUMENT;
  if (posted == 4096) return SYSTEM;
  ncclGroupStart();
  group[posted++] = one;
  return ncclGroupEnd();
}
int ncclSend(const void *from, size_t count, int type, int peer, communicator c, void *stream) {
  return post((message){0, peer, type, from, NULL, count, c});
}
int ncclRecv(void *to, size_t count, int type, int peer, communicator c, void *stream) {
  return post((message){1, peer, type, NULL, to, count, c});
}
int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, communicator c,
                  void *stream) {
  return op ? ARGUMENT : post((message){2, 0, type, from, to, count, c});
}

/* The rest of what cupy's module links, and nobody here calls. */
int ncclCommInitAll(void) { return USAGE; }
int ncclAllGather(void) { return USAGE; }
int ncclBcast(void) { return USAGE; }
int ncclBroadcast(void) { return USAGE; }
int ncclReduce(void) { return USAGE; }
int ncclReduceScatter(void) { return USAGE; }
