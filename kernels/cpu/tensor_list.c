/* A list's tensors read in one call, through the C exchange API of DLPack 1.2, the GIL held. */
#include <stdint.h>

/* DLPack's DLTensor. */
struct tensor {
    void *data;
    int32_t device_type, device, dims;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *sizes, *strides;
    uint64_t byte_offset;
};
/* Other than 0, with Python's error set, where the object cannot be read. */
typedef int read_tensor(void *object, struct tensor *tensor);

/* More bytes than any tensor has. Tensors without memory, such as torch's zeros, start at 0. */
#define MEMORY_BEGINS ((uint64_t)1 << 40)

/* Of CPython's stable ABI, whose headers are not everywhere. */
void *PyList_GetItem(void *list, intptr_t index);

/* Whether `count` tensors are contiguous, in memory and such as the rows of `like` have them: device
 * type, device, dtype code, bits, dimensions and sizes. Where they lie goes to `addresses`. */
int64_t are_like(read_tensor *read, void *list, int64_t count, const int64_t *like,
                 uint64_t *addresses)
{
    for (int64_t i = 0; i < count; i++) {
        struct tensor t;
        if (read(PyList_GetItem(list, i), &t) || t.device_type != like[0] ||
            t.device != like[1] || t.code != like[2] || t.bits != like[3] || t.dims != like[4])
            return 0;
        like += 5;
        int64_t step = 1;
        for (int k = t.dims - 1; k >= 0; k--) {
            if (t.sizes[k] != like[k] || (t.strides[k] != step && t.sizes[k] != 1))
                return 0;
            step *= t.sizes[k];
        }
        like += t.dims;
        addresses[i] = (uint64_t)t.data + t.byte_offset;
        if (addresses[i] < MEMORY_BEGINS)
            return 0;
    }
    return 1;
}
