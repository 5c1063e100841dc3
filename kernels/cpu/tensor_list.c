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
void *PyObject_Type(void *object);
void Py_DecRef(void *object);

/* Whether the object is of one of two types. */
static int has_type(void *object, void *const *types)
{
    void *type = PyObject_Type(object);
    Py_DecRef(type);
    return type == types[0] || type == types[1];
}

/* Whether `count` objects are tensors of one of two types, contiguous, in memory, on this device
 * and of these shapes: their number, and of each one its dimensions and its sizes. Where they lie
 * goes to `addresses`, what they hold to `dtypes`: DLPack's code times 256 and bits. */
int64_t read_list(read_tensor *read, void *list, int64_t count, void *const *types,
                  int64_t device_type, int64_t device, const int64_t *shapes, uint64_t *addresses,
                  int64_t *dtypes)
{
    if (*shapes++ != count)
        return 0;
    for (int64_t i = 0; i < count; i++) {
        void *object = PyList_GetItem(list, i);
        struct tensor t;
        if (!has_type(object, types) || read(object, &t) || t.device_type != device_type ||
            t.device != device || t.dims != *shapes++)
            return 0;
        int64_t step = 1;
        for (int k = t.dims - 1; k >= 0; k--) {
            if (t.sizes[k] != shapes[k] || (t.strides[k] != step && t.sizes[k] != 1))
                return 0;
            step *= t.sizes[k];
        }
        shapes += t.dims;
        addresses[i] = (uint64_t)t.data + t.byte_offset;
        dtypes[i] = t.code * 256 + t.bits;
        if (addresses[i] < MEMORY_BEGINS || t.lanes != 1)
            return 0;
    }
    return 1;
}
