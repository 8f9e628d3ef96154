/* A libnvidia-ml.so.1 of our own: what nvidia-ml-py calls for the pressure source, without a GPU.
 *
 * It proves our calls and what we make of the answers, not what a driver does. Every call reads the
 * file that $FAKE_NVML names, so a test can change the answers while it runs. One entry a line:
 *
 *     device UUID              the entries below are this device's
 *     samples US:PERCENT ...   buffered memory utilisation; without it the buffer is unsupported
 *     kind N                   nvmlValueType_t of the samples: 0 double, 1 unsigned int (default)
 *     rates PERCENT            memory utilisation without a time; without it unsupported
 *     dram PERCENT             GPM DRAM bandwidth, mean of two readings; without it no GPM
 *     dram_code CODE           nvmlReturn_t of that one metric
 *     fail CALL CODE [FROM [TO]]   CALL returns CODE, from its FROM-th to its TO-th time
 *     hang CALL MS             CALL takes that long
 *
 * Each call is added, by name, to the file $FAKE_NVML_LOG. Compile with -DnvmlX=gone_nvmlX to leave
 * the function nvmlX out.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };
enum { DEVICES = 4, SAMPLES = 256, CALLS = 32, MEMORY_SAMPLES = 2, DRAM_BW = 10, NAME = 64 };

typedef struct {
    char uuid[96];
    int count, has_buffer, kind, has_rates, has_dram, dram_code;
    unsigned long long at_us[SAMPLES];
    double percent[SAMPLES], rates, dram;
} Device;

typedef union {
    double d;
    unsigned int ui;
    unsigned long long ull;
} Value;

typedef struct {
    unsigned long long at_us;
    Value value;
} Sample;

typedef struct {
    double dram;
    int code;
} Reading;

/* As in nvml.h; the array of metrics is longer there, and grows with the version. */
typedef struct {
    unsigned version, count;
    Reading *earlier, *later;
    struct {
        unsigned id;
        int code;
        double value;
        const char *names[3];
    } metrics[1];
} Query;

static Device devices[DEVICES];
static int device_count, users;
static struct {
    char name[NAME];
    int times;
} seen[CALLS];

static int times_called(const char *call) {
    for (int i = 0; i < CALLS; i++) {
        if (!seen[i].name[0]) snprintf(seen[i].name, NAME, "%s", call);
        if (!strcmp(seen[i].name, call)) return ++seen[i].times;
    }
    abort();
}

static void note(const char *call) {
    const char *path = getenv("FAKE_NVML_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file) return;
    fprintf(file, "%s\n", call);
    fclose(file);
}

/* Read the control file; returns the code that this call is to fail with, or 0. */
static int enter(const char *call) {
    int times = times_called(call), code = OK;
    long hang_ms = 0;
    char *line = NULL;
    size_t room = 0;
    Device *device = NULL;
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;

    note(call);
    if (!file) return 999;
    device_count = 0;
    while (getline(&line, &room, file) > 0) {
        char word[NAME] = "", name[NAME] = "", *rest = NULL;
        int end = 0, failure = 0, from = 1, to = 1 << 30;
        sscanf(line, "%63s %n", word, &end);
        rest = line + end;
        if (!strcmp(word, "device") && device_count < DEVICES) {
            device = &devices[device_count++];
            memset(device, 0, sizeof *device);
            device->kind = 1;
            sscanf(rest, "%95s", device->uuid);
        } else if (!strcmp(word, "fail")) {
            sscanf(rest, "%63s %d %d %d", name, &failure, &from, &to);
            if (!strcmp(name, call) && times >= from && times <= to) code = failure;
        } else if (!strcmp(word, "hang")) {
            sscanf(rest, "%63s %d", name, &failure);
            if (!strcmp(name, call)) hang_ms = failure;
        } else if (device && !strcmp(word, "samples")) {
            device->has_buffer = 1;
            while (device->count < SAMPLES &&
                   sscanf(rest, "%llu:%lf %n", &device->at_us[device->count],
                          &device->percent[device->count], &end) == 2) {
                device->count++;
                rest += end;
            }
        } else if (device && !strcmp(word, "kind")) {
            device->kind = atoi(rest);
        } else if (device && !strcmp(word, "rates")) {
            device->has_rates = 1;
            device->rates = atof(rest);
        } else if (device && !strcmp(word, "dram")) {
            device->has_dram = 1;
            device->dram = atof(rest);
        } else if (device && !strcmp(word, "dram_code")) {
            device->dram_code = atoi(rest);
        }
    }
    free(line);
    fclose(file);
    if (hang_ms) {
        struct timespec pause = {hang_ms / 1000, hang_ms % 1000 * 1000000L};
        nanosleep(&pause, NULL);
    }
    return code;
}

#define ENTER(call)                  \
    do {                             \
        int code_ = enter(call);     \
        if (code_) return code_;     \
    } while (0)

#define ENTER_DEVICE(call)                                                \
    do {                                                                  \
        ENTER(call);                                                      \
        if (!users) return UNINITIALIZED;                                 \
        if (device < devices || device >= devices + device_count)         \
            return INVALID_ARGUMENT;                                      \
    } while (0)

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    ENTER("nvmlInitWithFlags");
    users++;
    return OK;
}

int nvmlShutdown(void) {
    ENTER("nvmlShutdown");
    if (!users) return UNINITIALIZED;
    users--;
    return OK;
}

const char *nvmlErrorString(int code) {
    static char text[NAME];
    snprintf(text, sizeof text, "fake error %d", code);
    return text;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER("nvmlDeviceGetCount");
    if (!users) return UNINITIALIZED;
    *count = (unsigned)device_count;
    return OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) {
    ENTER("nvmlDeviceGetHandleByUUID");
    if (!users) return UNINITIALIZED;
    for (int i = 0; i < device_count; i++)
        if (!strcmp(devices[i].uuid, uuid)) {
            *device = &devices[i];
            return OK;
        }
    return NOT_FOUND;
}

/* Without an array it says how many samples there may be, with one how many there are. */
int nvmlDeviceGetSamples(Device *device, int type, unsigned long long after_us, int *kind,
                         unsigned *count, Sample *samples) {
    unsigned found = 0;
    ENTER_DEVICE("nvmlDeviceGetSamples");
    if (type != MEMORY_SAMPLES) return INVALID_ARGUMENT;
    if (!device->has_buffer) return NOT_SUPPORTED;
    *kind = device->kind;
    if (!samples) {
        *count = SAMPLES;
        return OK;
    }
    for (int i = 0; i < device->count && found < *count; i++) {
        if (device->at_us[i] <= after_us) continue;
        memset(&samples[found], 0, sizeof samples[found]);
        samples[found].at_us = device->at_us[i];
        if (device->kind == 0)
            samples[found].value.d = device->percent[i];
        else
            samples[found].value.ui = (unsigned)device->percent[i];
        found++;
    }
    *count = found;
    return found ? OK : NOT_FOUND;
}

int nvmlDeviceGetUtilizationRates(Device *device, unsigned rates[2]) {
    ENTER_DEVICE("nvmlDeviceGetUtilizationRates");
    if (!device->has_rates) return NOT_SUPPORTED;
    rates[0] = 99; /* of the SMs, which nobody asked for */
    rates[1] = (unsigned)device->rates;
    return OK;
}

int nvmlGpmQueryDeviceSupport(Device *device, unsigned support[2]) {
    ENTER_DEVICE("nvmlGpmQueryDeviceSupport");
    if (support[0] != 1) return INVALID_ARGUMENT;
    support[1] = (unsigned)device->has_dram;
    return OK;
}

int nvmlGpmSampleAlloc(Reading **reading) {
    ENTER("nvmlGpmSampleAlloc");
    *reading = calloc(1, sizeof **reading);
    return *reading ? OK : 20;
}

int nvmlGpmSampleFree(Reading *reading) {
    ENTER("nvmlGpmSampleFree");
    free(reading);
    return OK;
}

int nvmlGpmSampleGet(Device *device, Reading *reading) {
    ENTER_DEVICE("nvmlGpmSampleGet");
    if (!device->has_dram) return NOT_SUPPORTED;
    reading->dram = device->dram;
    reading->code = device->dram_code;
    return OK;
}

int nvmlGpmMetricsGet(Query *query) {
    ENTER("nvmlGpmMetricsGet");
    if (query->version != 1 || query->count != 1 || query->metrics[0].id != DRAM_BW)
        return INVALID_ARGUMENT;
    query->metrics[0].code = query->later->code;
    query->metrics[0].value = (query->earlier->dram + query->later->dram) / 2;
    return OK;
}
