/* A driver's library whose GPUs are folders below $FAKE_NVML: 0, 1, ... Each file in one holds a number.

   A missing file means that the GPU does not tell that. The folder 0-mig is a MIG slice of 0. "error" is what every call of the GPU answers, and
   "set_error" what setting its limit answers. "deaf" makes a set succeed without effect. "kill" kills the process that
   sets a limit: 1 before the limit is set, 2 after it. While "hang" is there, calls of the GPU do not return. */

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

typedef struct { int index; int is_slice; } device;
typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } process;
static device devices[64], slices[64];

static int get(const char *gpu, const char *name, unsigned long long *value)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s%s%s", getenv("FAKE_NVML"), gpu, *gpu ? "/" : "", name);
    FILE *file = fopen(path, "r");
    if (!file)
        return NOT_SUPPORTED;
    int found = fscanf(file, "%llu", value) == 1;
    fclose(file);
    return found ? OK : NOT_SUPPORTED;
}

static int get_of(device *of, const char *name, unsigned long long *value)
{
    char gpu[24];
    unsigned long long error = OK;
    snprintf(gpu, sizeof gpu, of->is_slice ? "%d-mig" : "%d", of->index);
    while (get(gpu, "hang", &error) == OK)
        usleep(10000);
    if (get(gpu, "error", &error) == OK && error != OK)
        return (int)error;
    return get(gpu, name, value);
}

static int number(device *of, const char *name, unsigned *value)
{
    unsigned long long found = 0;
    int error = get_of(of, name, &found);
    *value = (unsigned)found;
    return error;
}

int nvmlInitWithFlags(unsigned flags)
{
    unsigned long long error = OK;
    (void)flags;
    return getenv("FAKE_NVML") && get("", "init_error", &error) == OK ? (int)error : OK;
}
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code)
{
    return code == NO_PERMISSION ? "Insufficient Permissions" : code == NOT_SUPPORTED ? "Not Supported" : "fake error";
}
int nvmlDeviceGetCount_v2(unsigned *count)
{
    unsigned long long value = 0;
    int error = get("", "count", &value);
    *count = (unsigned)value;
    return error;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **handle)
{
    unsigned long long ignored;
    devices[index].index = (int)index;
    *handle = &devices[index];
    int error = get_of(*handle, "limit", &ignored);
    return error == NOT_SUPPORTED ? OK : error;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, device **handle)
{
    int index = -1;
    int is_slice = sscanf(uuid, "MIG-%d", &index) == 1;
    if ((!is_slice && sscanf(uuid, "GPU-%d", &index) != 1) || index < 0 || index >= 64)
        return NOT_FOUND;
    if (!is_slice)
        return nvmlDeviceGetHandleByIndex_v2((unsigned)index, handle);
    slices[index] = (device){index, 1};
    *handle = &slices[index];
    unsigned long long ignored;
    return get_of(*handle, "memory_total", &ignored) == OK ? OK : NOT_FOUND;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device *slice, device **handle)
{
    return nvmlDeviceGetHandleByIndex_v2((unsigned)slice->index, handle);
}
int nvmlDeviceGetUUID(device *of, char *uuid, unsigned length)
{
    snprintf(uuid, length, "GPU-%d", of->index);
    return OK;
}
int nvmlDeviceGetPowerUsage(device *of, unsigned *value) { return number(of, "draw", value); }
int nvmlDeviceGetPowerManagementLimit(device *of, unsigned *value) { return number(of, "limit", value); }
int nvmlDeviceGetPowerManagementDefaultLimit(device *of, unsigned *value) { return number(of, "usual", value); }
int nvmlDeviceGetEnforcedPowerLimit(device *of, unsigned *value)
{
    unsigned limit, most;
    int error = number(of, "limit", &limit);
    if (error)
        return error;
    error = number(of, "enforced_most", &most);
    *value = error == OK && most < limit ? most : limit;
    return OK;
}
int nvmlDeviceGetPowerManagementLimitConstraints(device *of, unsigned *least, unsigned *most)
{
    int error = number(of, "least", least);
    return error ? error : number(of, "most", most);
}
int nvmlDeviceGetTotalEnergyConsumption(device *of, unsigned long long *value) { return get_of(of, "energy", value); }
int nvmlDeviceGetCurrentClocksThrottleReasons(device *of, unsigned long long *value)
{
    return get_of(of, "reasons", value);
}
int nvmlDeviceGetTemperature(device *of, int sensor, unsigned *value)
{
    (void)sensor;
    return number(of, "temperature", value);
}
int nvmlDeviceGetClockInfo(device *of, int type, unsigned *value)
{
    (void)type;
    return number(of, "clock", value);
}
int nvmlDeviceGetMemoryInfo(device *of, unsigned long long *memory)
{
    int error = get_of(of, "memory_total", &memory[0]);
    if (!error)
        error = get_of(of, "memory_free", &memory[1]);
    memory[2] = memory[0] - memory[1];
    return error;
}
int nvmlDeviceGetComputeRunningProcesses_v3(device *of, unsigned *count, process *found)
{
    unsigned room = *count;
    int error = number(of, "processes", count);
    if (error || !*count)
        return error;
    if (!found || room < *count)
        return INSUFFICIENT_SIZE;
    memset(found, 0, *count * sizeof *found);
    return OK;
}
int nvmlDeviceSetPowerManagementLimit(device *of, unsigned value)
{
    unsigned least, most;
    unsigned long long error;
    char path[4096];
    if (get_of(of, "set_error", &error) == OK && error != OK)
        return (int)error;
    if (number(of, "least", &least) || number(of, "most", &most) || value < least || value > most)
        return INVALID_ARGUMENT;
    if (get_of(of, "deaf", &error) == OK && error)
        return OK;
    if (get_of(of, "kill", &error) == OK && error == 1)
        raise(SIGKILL);
    snprintf(path, sizeof path, "%s/%d/limit", getenv("FAKE_NVML"), of->index);
    FILE *file = fopen(path, "w");
    if (!file)
        return NO_PERMISSION;
    fprintf(file, "%u\n", value);
    fclose(file);
    if (get_of(of, "kill", &error) == OK && error == 2)
        raise(SIGKILL);
    return OK;
}
