/* Declarations of Python's stable ABI, of DLPack's exchange of tensors and of torch's stable ABI
 * for reading.h and calls.h. With them, compiling needs neither Python's nor torch's headers, and
 * one library works with any version of both. No such interface changes:
 * https://docs.python.org/3/c-api/stable.html, DLPack 1,
 * https://docs.pytorch.org/docs/stable/notes/libtorch_stable_abi.html.
 */
#include <stddef.h>
#include <stdint.h>

typedef struct _object PyObject;
typedef struct _ts PyThreadState;
typedef intptr_t Py_ssize_t;
typedef PyObject *fast_function(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
typedef struct {
    const char *name;
    fast_function *function;
    int flags;
    const char *doc;
} PyMethodDef;
#define METH_FASTCALL 0x80

PyObject *PyCFunction_NewEx(PyMethodDef *method, PyObject *self, PyObject *module);
PyObject *PyObject_Type(PyObject *one);
PyObject *PyObject_GetAttr(PyObject *one, PyObject *name);
/* NULL in Python 3.10. */
__attribute__((weak)) PyObject *PyObject_Vectorcall(PyObject *callable, PyObject *const *arguments,
                                                    size_t count, PyObject *names);
int PyObject_IsTrue(PyObject *one);
Py_ssize_t PyObject_Size(PyObject *one);
PyObject *PySequence_Tuple(PyObject *sequence);
PyObject *PySequence_List(PyObject *sequence);
PyObject *PyTuple_GetItem(PyObject *tuple, Py_ssize_t at);
Py_ssize_t PyTuple_Size(PyObject *tuple);
PyObject *PyBytes_FromStringAndSize(const char *bytes, Py_ssize_t length);
char *PyBytes_AsString(PyObject *bytes);
int PyUnicode_CompareWithASCIIString(PyObject *text, const char *other);
PyObject *PyLong_FromLongLong(long long value);
long long PyLong_AsLongLong(PyObject *number);
PyObject *PyBool_FromLong(long truth);
double PyFloat_AsDouble(PyObject *number);
void *PyCapsule_GetPointer(PyObject *capsule, const char *name);
PyObject *PyErr_Occurred(void);
int PyErr_ExceptionMatches(PyObject *type);
void PyErr_Clear(void);
void PyErr_SetString(PyObject *type, const char *text);
PyThreadState *PyEval_SaveThread(void);
void PyEval_RestoreThread(PyThreadState *state);
int PyGILState_Ensure(void);
void PyGILState_Release(int state);
void Py_IncRef(PyObject *one);
void Py_DecRef(PyObject *one);

enum { DLPACK_CPU = 1, DLPACK_CUDA = 2, DLPACK_ROCM = 10 };
enum { DLPACK_FLOAT = 2, DLPACK_BFLOAT = 4 };
typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    const int64_t *shape;
    const int64_t *strides;
    uint64_t byte_offset;
} DLTensor;
typedef struct {
    uint32_t major, minor;
    void *older;
    void *unused[3];
    /* Writes a description that the tensor still owns. Returns other than 0 with an exception. */
    int (*lend)(void *tensor, DLTensor *out);
} DLPackExchangeAPI;

/* Functions of torch's stable ABI, in the order of native.py. They return other than 0 for an
 * error. A list does not own its tensors: each one is to be deleted, too. */
typedef struct {
    int32_t (*list_size)(void *list, size_t *size);
    int32_t (*list_item)(void *list, size_t at, void **tensor);
    int32_t (*delete_list)(void *list);
    int32_t (*data_of)(void *tensor, void **data);
    int32_t (*offset_of)(void *tensor, int64_t *elements);
    int32_t (*storage_of)(void *tensor, int64_t *bytes);
    int32_t (*delete_tensor)(void *tensor);
} TorchStableABI;
