/* Declarations of Python's stable ABI and of DLPack's exchange of tensors for reading.h and
 * calls.h. With them, compiling needs neither Python's nor torch's headers, and one library works
 * with any version of both. Neither interface changes:
 * https://docs.python.org/3/c-api/stable.html, DLPack 1.
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
PyObject *PyObject_Vectorcall(PyObject *callable, PyObject *const *arguments, size_t count,
                              PyObject *names);
int PyObject_IsTrue(PyObject *one);
Py_ssize_t PyObject_Size(PyObject *one);
PyObject *PySequence_Tuple(PyObject *sequence);
PyObject *PySequence_List(PyObject *sequence);
PyObject *PyList_New(Py_ssize_t length);
int PyList_SetItem(PyObject *list, Py_ssize_t at, PyObject *one);
PyObject *PyTuple_GetItem(PyObject *tuple, Py_ssize_t at);
Py_ssize_t PyTuple_Size(PyObject *tuple);
PyObject *PyTuple_Pack(Py_ssize_t length, ...);
PyObject *PyBytes_FromStringAndSize(const char *bytes, Py_ssize_t length);
int PyUnicode_CompareWithASCIIString(PyObject *text, const char *other);
PyObject *PyLong_FromLongLong(long long value);
long long PyLong_AsLongLong(PyObject *number);
void *PyLong_AsVoidPtr(PyObject *number);
double PyFloat_AsDouble(PyObject *number);
void *PyCapsule_GetPointer(PyObject *capsule, const char *name);
PyObject *PyErr_Occurred(void);
int PyErr_ExceptionMatches(PyObject *type);
void PyErr_Clear(void);
void PyErr_SetString(PyObject *type, const char *text);
PyThreadState *PyEval_SaveThread(void);
void PyEval_RestoreThread(PyThreadState *state);
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
