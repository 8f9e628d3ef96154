/* A libcuda.so.1 without a GPU: what green contexts need, for the real cuda.bindings.
 *
 * A set of SMs is a range [first, end): groups are taken from SM 0, the remainder is the rest.
 * This is a model of the driver: it shows that our calls are in order, not what a GPU does.
 *
 * FAKE_SMS    SMs of the device (132)        FAKE_CC      compute capability, 90 for 9.0
 * FAKE_REACH  SMs that groups can cover      FAKE_DRIVER  driver version, 13010 for 13.1
 * FAKE_UUID   every byte of the device's UUID (0)
 * FAKE_MPS    the MPS attribute (0)          FAKE_FAIL    CALL:CODE[:N],.. fails from call N (1)
 * FAKE_LOG    file that gets one line per call that makes, destroys or orders something
 * FAKE_WHO    1: what orders something says which SMs and which event, such as "wait 0-96 3"
 * FAKE_SALT   1: the opaque bytes of a split differ from process to process
 * FAKE_HANG   CALL that never returns        FAKE_CRASH   CALL that ends the process
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { int32_t type; struct { uint32_t tag, first, end, derived; uint8_t pad[76]; } in;
                 uint32_t count, minimum, alignment, flags, more[6]; void *next; } Resource;
_Static_assert(sizeof(Resource) == 144, "CUdevResource of cuda.h");
typedef struct { uint32_t count, coscheduled, preferred, flags, more[12]; } Group;
typedef struct { uint32_t first, end; int primary; } Context;
typedef struct { Context *context; } Stream;
enum { INVALID = 1, NO_INIT = 3, BAD_DEVICE = 101, BAD_CONTEXT = 201, NOT_FOUND = 500,
       BAD_TYPE = 914, BAD_CONFIGURATION = 915 };

static Context primary = {0, 0, 1};
static Context *stack[16];
static int depth, ready;

static int setting(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text && *text ? atoi(text) : otherwise;
}
static uint32_t total(void) { return (uint32_t)setting("FAKE_SMS", 132); }
static uint32_t alignment(void) { return setting("FAKE_CC", 90) >= 90 ? 8 : 2; }
static uint32_t minimum(void) { return setting("FAKE_CC", 90) >= 90 ? 8 : 4; }
static int version(void) { return setting("FAKE_DRIVER", 13010); }

static void note(const char *name) {
    static const char *path; static int looked;
    if (!looked) { path = getenv("FAKE_LOG"); looked = 1; }
    FILE *file = path && *path ? fopen(path, "a") : NULL;
    if (file) { fprintf(file, "%s\n", name); fclose(file); }
}
static int injected(const char *name) {
    static const char *all; static int looked, seen[8];
    const char *hang = getenv("FAKE_HANG"), *crash = getenv("FAKE_CRASH");
    while (hang && !strcmp(hang, name)) pause();
    if (crash && !strcmp(crash, name)) abort();
    if (!looked) { all = getenv("FAKE_FAIL"); looked = 1; }
    if (!all) return 0;
    size_t n = strlen(name);
    const char *fail = all;
    for (int i = 0; fail && *fail && i < 8; i++) {
        const char *next = strchr(fail, ',');
        if (!strncmp(fail, name, n) && fail[n] == ':') {
            const char *from = strchr(fail + n + 1, ':');
            if (from && next && from > next) from = NULL;
            return ++seen[i] >= (from ? atoi(from + 1) : 1) ? atoi(fail + n + 1) : 0;
        }
        fail = next ? next + 1 : NULL;
    }
    return 0;
}
#define BEGIN(name) do { int bad = injected(name); if (bad) return bad; \
                         if (!ready) return NO_INIT; } while (0)

static void fill(Resource *r, uint32_t first, uint32_t end, int derived) {
    memset(r, 0, sizeof *r);
    r->in.tag = 0x5eed + (setting("FAKE_SALT", 0) ? (uint32_t)getpid() : 0);
    r->in.first = first; r->in.end = end; r->in.derived = (uint32_t)derived;
    if (first == end) return;
    r->type = 1; r->count = end - first;
    if (version() >= 13000) { r->minimum = minimum(); r->alignment = alignment(); }
}

int cuInit(unsigned f) { (void)f; int bad = injected("cuInit"); if (bad) return bad;
    ready = 1; primary.end = total(); return 0; }
int cuDriverGetVersion(int *v) { BEGIN("cuDriverGetVersion"); *v = version(); return 0; }
int cuDeviceGet(int *d, int n) { BEGIN("cuDeviceGet"); *d = 0; return n ? BAD_DEVICE : 0; }
int cuDeviceGetUuid_v2(unsigned char *u, int d) { BEGIN("cuDeviceGetUuid"); (void)d;
    memset(u, setting("FAKE_UUID", 0), 16); return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { BEGIN("cuDeviceGetAttribute"); (void)d;
    int cc = setting("FAKE_CC", 90);
    *v = a == 75 ? cc / 10 : a == 76 ? cc % 10 : a == 133 ? setting("FAKE_MPS", 0) : 0; return 0; }
int cuDeviceGetName(char *name, int room, int d) { BEGIN("cuDeviceGetName"); (void)d;
    snprintf(name, (size_t)room, "fake device"); return 0; }
/* Nothing here takes device memory. */
int cuMemGetInfo_v2(size_t *unused, size_t *all) { BEGIN("cuMemGetInfo");
    if (!depth) return BAD_CONTEXT;
    *unused = *all = (size_t)1 << 33; return 0; }
int cuCtxGetCurrent(Context **c) { BEGIN("cuCtxGetCurrent");
    *c = depth ? stack[depth - 1] : NULL; return 0; }
int cuDevicePrimaryCtxRetain(Context **c, int d) { BEGIN("cuDevicePrimaryCtxRetain"); (void)d;
    *c = &primary; note("retain"); return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { BEGIN("cuDevicePrimaryCtxRelease"); (void)d; note("release"); return 0; }
int cuCtxPushCurrent_v2(Context *c) { BEGIN("cuCtxPushCurrent"); stack[depth++] = c;
    note("push"); return 0; }
int cuCtxPopCurrent_v2(Context **c) { BEGIN("cuCtxPopCurrent"); if (!depth) return BAD_CONTEXT; *c = stack[--depth];
    note("pop"); return 0; }
int cuDeviceGetDevResource(int d, Resource *r, int type) { BEGIN("cuDeviceGetDevResource");
    (void)d; if (type != 1) return BAD_TYPE; fill(r, 0, total(), 0); return 0; }

static int split(Resource *group, const Resource *from, Resource *rest, uint32_t want) {
    if (from->type != 1) return BAD_TYPE;
    if (from->in.derived) return BAD_CONFIGURATION;
    if (want > (uint32_t)setting("FAKE_REACH", (int)(from->count / alignment() * alignment())))
        return BAD_CONFIGURATION;
    uint32_t end = from->in.end;
    fill(group, 0, want, 1); fill(rest, want, end, 1); return 0;
}
int cuDevSmResourceSplitByCount(Resource *groups, unsigned *n, const Resource *from,
                                Resource *rest, unsigned flags, unsigned least) {
    BEGIN("cuDevSmResourceSplitByCount"); (void)flags;
    uint32_t want = least < minimum() ? minimum() : least, a = alignment();
    *n = 1; return split(groups, from, rest, (want + a - 1) / a * a);
}
int cuDevSmResourceSplit(Resource *groups, unsigned n, const Resource *from, Resource *rest,
                         unsigned flags, Group *group) {
    BEGIN("cuDevSmResourceSplit"); if (n != 1 || flags) return INVALID;
    if (group->coscheduled % 2 || (group->coscheduled && group->count % group->coscheduled))
        return BAD_CONFIGURATION;
    return split(groups, from, rest, group->count);
}
int cuDevResourceGenerateDesc(void **d, Resource *r, unsigned n) {
    BEGIN("cuDevResourceGenerateDesc"); if (n != 1) return INVALID; if (r->type != 1) return BAD_TYPE;
    *d = malloc(sizeof *r); memcpy(*d, r, sizeof *r); return 0;
}
int cuGreenCtxCreate(Context **c, Resource *d, int device, unsigned flags) {
    BEGIN("cuGreenCtxCreate"); (void)device; if (flags != 1) return INVALID;
    if (!depth) return BAD_CONTEXT;
    *c = calloc(1, sizeof **c); (*c)->first = d->in.first; (*c)->end = d->in.end;
    note("context"); return 0;
}
int cuGreenCtxDestroy(Context *c) { BEGIN("cuGreenCtxDestroy"); (void)c; note("-context"); return 0; }
int cuGreenCtxGetDevResource(Context *c, Resource *r, int type) {
    BEGIN("cuGreenCtxGetDevResource"); if (type != 1) return BAD_TYPE;
    fill(r, c->first, c->end, 0); return 0;
}
int cuGreenCtxStreamCreate(Stream **s, Context *c, unsigned flags, int priority) {
    BEGIN("cuGreenCtxStreamCreate"); (void)priority; if (flags != 1) return INVALID;
    *s = calloc(1, sizeof **s); (*s)->context = c; note("stream"); return 0;
}
/* No work is ever launched, so a stream is always done. */
int cuStreamSynchronize(Stream *s) { BEGIN("cuStreamSynchronize"); (void)s; return 0; }
int cuStreamDestroy_v2(Stream *s) { BEGIN("cuStreamDestroy"); (void)s; note("-stream"); return 0; }
static void order(const char *verb, const Stream *s, const int *e) {
    char line[64];
    if (!setting("FAKE_WHO", 0)) snprintf(line, sizeof line, "%s %s", verb, s ? "level" : "outer");
    else if (!s) snprintf(line, sizeof line, "%s outer %d", verb, *e);
    else snprintf(line, sizeof line, "%s %u-%u %d", verb, s->context->first, s->context->end, *e);
    note(line);
}
int cuEventCreate(int **e, unsigned f) { BEGIN("cuEventCreate"); (void)f; static int made;
    *e = malloc(sizeof **e); **e = ++made; note("event"); return 0; }
int cuEventDestroy_v2(int *e) { BEGIN("cuEventDestroy"); (void)e; note("-event"); return 0; }
int cuEventRecord(int *e, Stream *s) { BEGIN("cuEventRecord"); order("record", s, e); return 0; }
int cuStreamWaitEvent(Stream *s, int *e, unsigned f) { BEGIN("cuStreamWaitEvent"); (void)f;
    order("wait", s, e); return 0; }

#define S(name, since) {#name, since, (void *)name}
#define V(name, since) {#name, since, (void *)name##_v2}
static int cuGetProcAddress_any(const char *, void **, int, uint64_t, int *);
static const struct { const char *name; int since; void *function; } TABLE[] = {
    S(cuInit, 0), S(cuDriverGetVersion, 0), S(cuDeviceGet, 0), S(cuDeviceGetAttribute, 0),
    V(cuDeviceGetUuid, 0), S(cuDeviceGetName, 0), V(cuMemGetInfo, 0), S(cuStreamSynchronize, 0),
    S(cuCtxGetCurrent, 0), S(cuDevicePrimaryCtxRetain, 0), V(cuDevicePrimaryCtxRelease, 0),
    V(cuCtxPushCurrent, 0), V(cuCtxPopCurrent, 0), S(cuDeviceGetDevResource, 12040),
    S(cuDevSmResourceSplitByCount, 12040), S(cuDevSmResourceSplit, 13010),
    S(cuDevResourceGenerateDesc, 12040), S(cuGreenCtxCreate, 12040),
    S(cuGreenCtxDestroy, 12040), S(cuGreenCtxGetDevResource, 12040),
    S(cuGreenCtxStreamCreate, 12050), V(cuStreamDestroy, 0), S(cuEventCreate, 0),
    V(cuEventDestroy, 0), S(cuEventRecord, 0), S(cuStreamWaitEvent, 0),
    {"cuGetProcAddress", 0, (void *)cuGetProcAddress_any},
};
/* NVIDIA's libraries look for the driver's hidden tables and go on without. */
int cuGetExportTable(const void **table, const void *id) { (void)id; *table = NULL; return NOT_FOUND; }
static int cuGetProcAddress_any(const char *name, void **f, int v, uint64_t flags, int *status) {
    (void)v; (void)flags; *f = NULL;
    for (unsigned i = 0; i < sizeof TABLE / sizeof *TABLE; i++)
        if (!strcmp(name, TABLE[i].name) && version() >= TABLE[i].since) *f = TABLE[i].function;
    if (status) *status = *f ? 0 : 1;
    return *f ? 0 : NOT_FOUND;
}
int cuGetProcAddress_v2(const char *name, void **f, int v, uint64_t flags, int *status) {
    return cuGetProcAddress_any(name, f, v, flags, status);
}
