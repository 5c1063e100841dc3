/* A libcuda.so.1 for machines without a GPU: it says that there is one, keeps memory on the host, and
 * gives every launch to a function of the test. Streams, events and graphs are the test's, too.
 *
 * As on a GPU, a pointer that cuMemAlloc has not given is none of the device's, a handle that was not
 * made here is invalid, and what the launch answers as an error is the caller's error, with its text.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* Nothing here makes a tensor map: Triton only looks for the symbols. */
#define cuTensorMapEncodeTiled declared_tiled
#define cuTensorMapEncodeIm2col declared_im2col
#include "cuda.h"
#undef cuTensorMapEncodeTiled
#undef cuTensorMapEncodeIm2col

#define EXPORT __attribute__((visibility("default"))) CUresult
enum { MOST_BLOCKS = 1 << 16, MOST_MODULES = 1 << 12 };

/* Of a launch: grid, block and bytes of shared memory; attributes by their number and first word. */
typedef int (*launch_function)(unsigned long long function, const unsigned *dims,
                               unsigned long long stream, unsigned count, const unsigned *attributes,
                               void **parameters);
typedef int (*attribute_function)(int attribute);

static launch_function on_launch;
static attribute_function on_attribute;
static int capturing;
static char message[1024] = "no error";
static int context;
static struct { char *begin; size_t size; } blocks[MOST_BLOCKS];
static int block_count;
static char names[MOST_MODULES][128];
static int module_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void pretend_answer_by(launch_function launch, attribute_function attribute) {
  on_launch = launch;
  on_attribute = attribute;
}
void pretend_capturing(int value) { capturing = value; }
void pretend_message(const char *text) { strncpy(message, text, sizeof message - 1); }

EXPORT cuInit(unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
EXPORT cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
EXPORT cuDeviceGetCount(int *count) { *count = 1; return CUDA_SUCCESS; }
EXPORT cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
EXPORT cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = on_attribute(attribute);
  return device == 0 && *value >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORT cuGetErrorString(CUresult error, const char **text) {
  *text = message;
  return error == CUDA_SUCCESS ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static CUresult current(CUcontext *found) { *found = (CUcontext)&context; return CUDA_SUCCESS; }
EXPORT cuCtxGetCurrent(CUcontext *found) { return current(found); }
EXPORT cuDevicePrimaryCtxRetain(CUcontext *found, CUdevice device) {
  return device == 0 ? current(found) : CUDA_ERROR_INVALID_DEVICE;
}
EXPORT cuCtxSetCurrent(CUcontext given) {
  return given == (CUcontext)&context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
EXPORT cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
EXPORT cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 1 << 20; return CUDA_SUCCESS; }
EXPORT cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

EXPORT cuMemAlloc(CUdeviceptr *address, size_t size) {
  void *begin;
  pthread_mutex_lock(&lock);
  CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
  if (size && block_count < MOST_BLOCKS && !posix_memalign(&begin, 512, size)) {
    blocks[block_count].begin = begin;
    blocks[block_count++].size = size;
    *address = (CUdeviceptr)begin;
    result = CUDA_SUCCESS;
  }
  pthread_mutex_unlock(&lock);
  return result;
}
EXPORT cuMemFree(CUdeviceptr address) {
  CUresult result = CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < block_count; i++)
    if (blocks[i].begin == (char *)address) {
      free(blocks[i].begin);
      blocks[i] = blocks[--block_count];
      result = CUDA_SUCCESS;
      break;
    }
  pthread_mutex_unlock(&lock);
  return result;
}
EXPORT cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
  CUresult result = CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < block_count && result; i++) {
    char *begin = blocks[i].begin;
    if ((char *)address >= begin && (char *)address < begin + blocks[i].size) result = CUDA_SUCCESS;
  }
  pthread_mutex_unlock(&lock);
  if (result == CUDA_SUCCESS && attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    *(CUdeviceptr *)data = address;
  return result;
}

/* A module has one function, whose handle is the module's and tells its number. */
EXPORT cuModuleLoadData(CUmodule *module, const void *image) {
  pthread_mutex_lock(&lock);
  int found = module_count < MOST_MODULES ? ++module_count : 0;
  pthread_mutex_unlock(&lock);
  *module = (CUmodule)(size_t)found;
  return found && !memcmp(image, "\177ELF", 4) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}
EXPORT cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
EXPORT cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  strncpy(names[(size_t)module - 1], name, sizeof names[0] - 1);
  *function = (CUfunction)module;
  return CUDA_SUCCESS;
}
EXPORT cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
           : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS           ? 32
                                                               : 0;
  return CUDA_SUCCESS;
}
EXPORT cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return CUDA_SUCCESS;
}
EXPORT cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
EXPORT cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  *count = 0;
  return CUDA_ERROR_NOT_SUPPORTED;
}
EXPORT cuTensorMapEncodeTiled(void) { return CUDA_ERROR_NOT_SUPPORTED; }
EXPORT cuTensorMapEncodeIm2col(void) { return CUDA_ERROR_NOT_SUPPORTED; }
EXPORT cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

EXPORT cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters,
                        void **extra) {
  unsigned dims[] = {config->gridDimX,  config->gridDimY,  config->gridDimZ,      config->blockDimX,
                     config->blockDimY, config->blockDimZ, config->sharedMemBytes};
  unsigned attributes[32];
  if ((size_t)function < 1 || (size_t)function > module_count) return CUDA_ERROR_INVALID_HANDLE;
  if (!parameters || extra || config->numAttrs > 16) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < config->numAttrs; i++) {
    attributes[2 * i] = config->attrs[i].id;
    memcpy(attributes + 2 * i + 1, &config->attrs[i].value, sizeof(unsigned));
  }
  return on_launch((size_t)function, dims, (size_t)config->hStream, config->numAttrs, attributes,
                   parameters);
}
EXPORT cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                      unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                      CUstream stream, void **parameters, void **extra) {
  CUlaunchConfig config = {grid_x,  grid_y, grid_z, block_x, block_y, block_z,
                           shared, stream, NULL,   0};
  return cuLaunchKernelEx(&config, function, parameters, extra);
}
