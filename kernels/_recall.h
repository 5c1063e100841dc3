/* How kernels/_recall.c finds what is known of a call, and takes from it how to make the call again.
 *
 * The functions return 1 for yes, 0 for no, -1 for an error; who returns an object, NULL for an error.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stdint.h>

#include "_tasks.h"

/* Tensors for which there is room without asking for memory. */
enum { FEW = 24, OTHERS = 2 };

/* What is read of a tensor, and torch's function that does: dlpack's DLTensor, and of its exchange API
 * what leads there, both of version 1. Tensors without sizes or memory of their own are errors there:
 * nested ones, of which a guard would end the process, sparse ones, those inside vmap. */
struct reading {
    void *data;
    int32_t device, index, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};
enum { ON_CPU = 1 };

struct exchange {
    uint32_t major, minor;
    struct exchange *older;
    void (*others[3])(void);
    int (*read)(void *tensor, struct reading *to);
};

/* Set once by `prepare`, kept for good. */
static int (*read_tensor)(void *tensor, struct reading *to);
static PyTypeObject *tensor_type;
static PyObject *plain, *empty_like, *increment_version, *get_num_threads;
static unsigned long long far;
static double least_safe, most_safe;
static PyObject *state, *libraries;

/* What is read of a Known, in its slots: where these lie is found out at the first. */
enum { CHECK, WRITABLE, PLACES, JOB, SLOTS };
static PyTypeObject *known_type;
static Py_ssize_t offsets[SLOTS];

struct call {
    /* Inputs, others and output as far as given; who calls keeps them. The slot before the first is
     * lent to those who are called with them. */
    PyObject **tensors;
    Py_ssize_t count;
    /* Of which the first so many are asked where they lie. */
    Py_ssize_t placed;
    /* Where among them these are, found_inf the last of the others; -1: not given. */
    Py_ssize_t other[OTHERS], found_inf, out;
    /* Elements of the first and of the last. */
    int64_t first, last;
    /* What was found, to be let go by `leave`: a Known; a Place or None; uint64s in bytes. */
    PyObject *known, *place, *addresses;
    PyObject *room[FEW + 1];
};

static void leave(struct call *call)
{
    if (call->tensors && call->tensors != call->room + 1)
        PyMem_Free(call->tensors - 1);
    Py_XDECREF(call->known);
    Py_XDECREF(call->place);
    Py_XDECREF(call->addresses);
}

static int learn_slots(PyTypeObject *type)
{
    static const char *const names[SLOTS] = {"check", "writable", "places", "job"};
    for (int i = 0; i < SLOTS; i++) {
        PyObject *slot = PyObject_GetAttrString((PyObject *)type, names[i]);
        if (!slot)
            return -1;
        int is_slot = Py_TYPE(slot) == &PyMemberDescr_Type;
        if (is_slot)
            offsets[i] = ((PyMemberDescrObject *)slot)->d_member->offset;
        Py_DECREF(slot);
        if (!is_slot)
            return 0;
    }
    known_type = (PyTypeObject *)Py_NewRef((PyObject *)type);
    return 1;
}

/* What a Known has there: a new reference, as another thread may put something else in its place. */
static PyObject *of_known(PyObject *known, int slot)
{
    return Py_NewRef(*(PyObject **)((char *)known + offsets[slot]));
}

static int64_t numel(const struct reading *tensor)
{
    int64_t count = 1;
    for (int i = 0; i < tensor->ndim; i++)
        count *= tensor->shape[i];
    return count;
}

/* Whether all are tensors of the usual kind, and on the CPU if they have to be; and where they lie. */
static int read_all(struct call *call, int on_cpu)
{
    call->addresses = PyBytes_FromStringAndSize(NULL, call->placed * sizeof(uint64_t));
    if (!call->addresses)
        return -1;
    uint64_t *addresses = (uint64_t *)PyBytes_AS_STRING(call->addresses);
    for (Py_ssize_t i = 0; i < call->count; i++) {
        PyObject *tensor = call->tensors[i];
        struct reading reading;
        if (Py_TYPE(tensor) != tensor_type) {
            int answer = PySet_Contains(plain, (PyObject *)Py_TYPE(tensor));
            if (answer != 1)
                return answer;
        }
        if (read_tensor(tensor, &reading) != 0)
            return -1;
        if (on_cpu && reading.device != ON_CPU)
            return 0;
        if (i < call->placed)
            addresses[i] = (uintptr_t)reading.data + reading.byte_offset;
        if (i == 0)
            call->first = numel(&reading);
        if (i == call->count - 1)
            call->last = numel(&reading);
    }
    return 1;
}

/* Every tensor that is given, in the order in which guards know them. */
static int gather(struct call *call, PyObject *const *inputs, Py_ssize_t count,
                  PyObject *const *others, Py_ssize_t other_count, PyObject *out,
                  PyObject *beside)
{
    call->known = call->place = call->addresses = NULL;
    call->tensors = call->room + 1;
    if (count + other_count + 2 > FEW) {
        PyObject **room = PyMem_Malloc((count + other_count + 3) * sizeof *room);
        call->tensors = room ? room + 1 : NULL;
        if (!room)
            return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        call->tensors[i] = inputs[i];
    call->count = count;
    for (Py_ssize_t i = 0; i < other_count; i++) {
        call->other[i] = others[i] == Py_None ? -1 : call->count;
        if (others[i] != Py_None)
            call->tensors[call->count++] = others[i];
    }
    call->found_inf = other_count ? call->other[other_count - 1] : -1;
    call->out = -1;
    if (out != Py_None) {
        for (call->out = 0; call->out < count && inputs[call->out] != out;)
            call->out++;
        if (call->out == count) {
            call->out = call->count;
            call->tensors[call->count++] = out;
        }
    }
    call->placed = call->count;
    if (beside != Py_None)
        call->tensors[call->count++] = beside;
    return 1;
}

/* The key of KnownCalls.calls: _SIGHT of kernels/_known.py. */
static PyObject *sight_of(const struct call *call, PyObject *key, Py_ssize_t count,
                          Py_ssize_t other_count)
{
    int64_t given = 1, at = call->out < 0 ? -2 : call->out < count ? call->out : -1;
    for (Py_ssize_t i = 0; i < other_count; i++)
        given = given << 1 | (call->other[i] >= 0);
    int64_t sight[] = {(intptr_t)key, call->count, call->first, call->last, at, given};
    return PyBytes_FromStringAndSize((const char *)sight, sizeof sight);
}

/* A Known whose guard takes the tensors. */
static int find_known(struct call *call, PyObject *alike)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(alike); i++) {
        PyObject *known = PyTuple_GET_ITEM(alike, i);
        int found = Py_TYPE(known) == known_type ? 1 : learn_slots(Py_TYPE(known));
        if (found != 1)
            return found;
        PyObject *guard = of_known(known, CHECK);
        found = 0;
        if (guard != Py_None) {
            size_t count = call->count | PY_VECTORCALL_ARGUMENTS_OFFSET;
            PyObject *answer = PyObject_Vectorcall(guard, call->tensors, count, NULL);
            found = answer ? PyObject_IsTrue(answer) : -1;
            Py_XDECREF(answer);
        }
        Py_DECREF(guard);
        if (found > 0) {
            call->known = Py_NewRef(known);
            PyObject *of_all = of_known(known, WRITABLE);
            Py_DECREF(of_all);
            /* Else Python has to ask each tensor. */
            return of_all == Py_True;
        }
        if (found < 0)
            return -1;
    }
    return 0;
}

/* What is known of where the tensors lie: a Place, or None. */
static int find_place(struct call *call)
{
    PyObject *known_places = of_known(call->known, PLACES);
    PyObject *place = PyDict_GetItemWithError(known_places, call->addresses);
    call->place = Py_NewRef(place ? place : Py_None);
    Py_DECREF(known_places);
    return PyErr_Occurred() ? -1 : 1;
}

/* calls: a dict; key: what KnownCalls.checked was given. on_cpu: whether only such a call is looked for.
 * To be ended by `leave`, whatever it says. */
static int find(struct call *call, PyObject *calls, PyObject *key, PyObject *const *inputs,
                Py_ssize_t count, PyObject *const *others, Py_ssize_t other_count, PyObject *out,
                PyObject *beside, int on_cpu)
{
    int answer = gather(call, inputs, count, others, other_count, out, beside);
    if (answer != 1 || call->count == 0)
        return answer == 1 ? 0 : answer;
    if ((answer = read_all(call, on_cpu)) != 1)
        return answer;
    PyObject *sight = sight_of(call, key, count, other_count);
    if (!sight)
        return -1;
    PyObject *alike = PyDict_GetItemWithError(calls, sight);
    Py_DECREF(sight);
    if (!alike)
        return PyErr_Occurred() ? -1 : 0;
    Py_INCREF(alike);
    answer = find_known(call, alike);
    Py_DECREF(alike);
    return answer == 1 ? find_place(call) : answer;
}

/* What Known.job says of a call on CPU tensors: a kernels.cpu.native.Job. */
struct job {
    PyObject *whole;
    void (*function)(const void *);
    const void *task;
    PyObject *like;
};

/* Whether the call can be made: its tensors are in memory, and the functions still those in use. */
static int take_job(const struct call *call, size_t size, struct job *taken)
{
    if (call->place == Py_None || PyObject_Size(PyTuple_GET_ITEM(call->place, 1)) < 1)
        return 0;
    PyObject *whole = taken->whole = of_known(call->known, JOB);
    if (whole == Py_None)
        return 0;
    PyObject *now = PyDict_GetItemWithError(PyModule_GetDict(PyTuple_GET_ITEM(whole, 0)), state);
    PyObject *used = now ? PyObject_GetAttr(now, libraries) : NULL;
    Py_XDECREF(used);
    if (used != PyTuple_GET_ITEM(whole, 1))
        return used ? 0 : -1;
    PyObject *task = PyTuple_GET_ITEM(whole, 3);
    taken->function = (void (*)(const void *))PyLong_AsVoidPtr(PyTuple_GET_ITEM(whole, 2));
    taken->task = PyBytes_AS_STRING(task);
    taken->like = PyTuple_GET_ITEM(whole, 4);
    return taken->function && (size_t)PyBytes_GET_SIZE(task) == size;
}

/* Whether memory is what was asked for: a mode of the user's may have made something else of it. */
static int replaces(const struct reading *found, const struct reading *wanted)
{
    if (found->device != ON_CPU || found->code != wanted->code || found->bits != wanted->bits
        || found->lanes != wanted->lanes || found->ndim != wanted->ndim)
        return 0;
    int64_t step = 1;
    for (int i = found->ndim - 1; i >= 0; i--) {
        int64_t size = found->shape[i];
        if (size != wanted->shape[i] || (size != 1 && found->strides[i] != step))
            return 0;
        step *= size;
    }
    return (uintptr_t)found->data >= far;
}

/* An output nobody has yet, and its address; NULL where there is none that C may write to. */
static PyObject *fresh(const struct job *taken, void **address)
{
    PyObject *made = PyObject_CallOneArg(empty_like, taken->like);
    struct reading wanted, found;
    if (made && (Py_TYPE(made) != tensor_type || read_tensor(taken->like, &wanted) != 0
                 || read_tensor(made, &found) != 0 || !replaces(&found, &wanted)))
        Py_CLEAR(made);
    if (made)
        *address = found.data;
    return made;
}

static void *at(const struct call *call, Py_ssize_t place)
{
    return place < 0 ? NULL : (void *)((uint64_t *)PyBytes_AS_STRING(call->addresses))[place];
}

/* For so many elements: how many; 0 for so few that Python's other threads can wait; -1: an error. */
static int64_t threads_for(int64_t elements)
{
    if (elements <= ALONE)
        return 0;
    PyObject *value = PyObject_CallNoArgs(get_num_threads);
    int64_t count = value ? PyLong_AsLongLong(value) : -1;
    Py_XDECREF(value);
    return count;
}

/* Tell autograd that `count` tensors of the user's were written, and the flag. */
static int mark_written(const struct call *call, PyObject *const *tensors, Py_ssize_t count)
{
    Py_ssize_t flags = call->found_inf >= 0;
    if (count + flags == 0)
        return 1;
    PyObject *written = PyList_New(count + flags);
    if (!written)
        return -1;
    for (Py_ssize_t i = 0; i < count; i++)
        PyList_SET_ITEM(written, i, Py_NewRef(tensors[i]));
    if (flags)
        PyList_SET_ITEM(written, count, Py_NewRef(call->tensors[call->found_inf]));
    PyObject *done = PyObject_CallOneArg(increment_version, written);
    Py_DECREF(written);
    Py_XDECREF(done);
    return done ? 1 : -1;
}
