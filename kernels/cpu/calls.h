/* Direct calls in one pass: check the arguments, bind them and run, for what nearly every call is:
 * plain tensors on the CPU, of which no derivative is asked for.
 *
 * What this takes is what the checks in Python take, and anything else it leaves to them: they find
 * the words for what is wrong, and run what is right but rare. Until a function of `functions` runs,
 * nothing is written. tests/kernels/cpu/test_calls.py compares each verdict with Python's.
 */
#include "interfaces.h"

#include <stdlib.h>

/* What a function takes: tensors of one dtype; an output of that dtype; segments; the slots of a
 * layout; and what it writes: rows of dot products, which it makes, or its tensors. */
enum { ALIKE = 1, OUT_ALIKE = 2, CUT = 4, PACKED = 8, ROWS = 16, UNPACKS = 32 };
static const struct function {
    void (*run)(const struct task *);
    int takes;
} functions[] = {
    /* In the order of CALLS in native.py. */
    {copy, PACKED},
    {copy, PACKED | UNPACKS},
    {sum_n, ALIKE},
    {scaled_add, 0},
    {dot_and_norms, ALIKE | CUT | ROWS},
    {adasum, ALIKE | OUT_ALIKE | CUT},
};
/* What native.py passes, in its order: what is asked of tensors, and with what they are made. */
static struct {
    PyObject *none, *tensor, *parameter, *list, *tuple, *integer, *exception;
    PyObject *is_neg, *is_inference, *untyped_storage, *storage_offset, *requires_grad;
    PyObject *is_grad_enabled, *is_inference_mode_enabled, *unpack_dual;
    PyObject *increment_version, *get_num_threads;
    PyObject *empty, *empty_names, *cpu, *empty_like, *like_names, *contiguous, *new_rows;
    PyObject *dtypes[4];
    PyObject *capsule, *parallel, *thread_num, *num_threads;
} py;
static const DLPackExchangeAPI *exchange;
/* Memory that torch allocates lies above; below are offsets into none, as in kernels/memory.py. */
#define FAR ((uintptr_t)1 << 40)

struct seen {
    char *data;
    int64_t numel, bytes, dtype;
    int64_t ndim;
    const int64_t *shape;
};

/* The answer of a method of a tensor without arguments, as a number; -1 with an exception. */
static int64_t ask(PyObject *method, PyObject *tensor, int64_t (*number_of)(PyObject *))
{
    PyObject *found = PyObject_Vectorcall(method, &tensor, 1, NULL);
    int64_t number = found ? number_of(found) : -1;
    Py_DecRef(found);
    return number;
}

static int64_t truth(PyObject *found)
{
    return PyObject_IsTrue(found);
}

static int64_t number(PyObject *found)
{
    return PyLong_AsLongLong(found);
}

/* The answer of a function without arguments. */
static int64_t tell(PyObject *function)
{
    PyObject *found = PyObject_Vectorcall(function, NULL, 0, NULL);
    int64_t answer = found ? PyLong_AsLongLong(found) : -1;
    Py_DecRef(found);
    return answer;
}

static int64_t length(PyObject *found)
{
    return PyObject_Size(found);
}

static int64_t bytes_of(int dtype, int64_t numel)
{
    return (char *)element(0, dtype, numel) - (char *)0;
}

/* The number of a dtype, or -1. */
static int dtype_of(const DLTensor *t)
{
    if (t->lanes != 1 || !(t->code == DLPACK_FLOAT || (t->code == DLPACK_BFLOAT && t->bits == 16)))
        return -1;
    if (t->code == DLPACK_BFLOAT)
        return BFLOAT16;
    return t->bits == 16 ? FLOAT16 : t->bits == 32 ? FLOAT32 : t->bits == 64 ? FLOAT64 : -1;
}

/* Whether this is a plain, contiguous tensor on the CPU. */
static int see(PyObject *tensor, struct seen *s)
{
    PyObject *type = PyObject_Type(tensor);
    DLTensor t;
    Py_DecRef(type);
    if ((type != py.tensor && type != py.parameter) || exchange->lend(tensor, &t))
        return 0;
    int dtype = t.device_type == DLPACK_CPU ? dtype_of(&t) : -1;
    if (dtype < 0)
        return 0;
    int64_t step = 1, dense = 1;
    for (int i = t.ndim - 1; i >= 0; i--) {
        dense &= t.shape[i] == 1 || t.strides[i] == step;
        step *= t.shape[i];
    }
    if (step && !dense)
        return 0;
    *s = (struct seen){.data = (char *)t.data + t.byte_offset, .numel = step, .dtype = dtype,
                       .ndim = t.ndim, .shape = t.shape};
    s->bytes = bytes_of(dtype, step);
    return step == 0 || (uintptr_t)s->data >= FAR;
}

/* Whether a tensor has in its memory what it was seen to have; `following`: and, as grad mode is on,
 * requires no gradient. */
static int has_memory(PyObject *tensor, int following, const struct seen *s)
{
    if (following) {
        PyObject *asks = PyObject_GetAttr(tensor, py.requires_grad);
        int64_t yes = asks ? PyObject_IsTrue(asks) : -1;
        Py_DecRef(asks);
        if (yes != 0)
            return 0;
    }
    if (ask(py.is_neg, tensor, truth) != 0)
        return 0;
    int64_t held = ask(py.untyped_storage, tensor, length);
    int64_t start = held < 0 ? -1 : ask(py.storage_offset, tensor, number);
    return start >= 0 && (s->numel == 0 || bytes_of(s->dtype, start) + s->bytes <= held);
}

static int same_shape(const struct seen *s, int64_t ndim, const int64_t *shape)
{
    return s->ndim == ndim && (ndim == 0 || !memcmp(s->shape, shape, ndim * sizeof *shape));
}

static int overlap(const struct seen *a, const struct seen *b)
{
    return a->bytes && b->bytes && a->data < b->data + b->bytes && b->data < a->data + a->bytes;
}

static int by_address(const void *a, const void *b)
{
    const struct seen *x = a, *y = b;
    return (x->data > y->data) - (x->data < y->data);
}

/* Whether no two share memory; sorts them. */
static int disjoint(struct seen *all, int64_t count)
{
    qsort(all, count, sizeof *all, by_address);
    const char *end = 0;
    for (int64_t i = 0; i < count; i++)
        if (all[i].bytes) {
            if (all[i].data < end)
                return 0;
            end = all[i].data + all[i].bytes;
        }
    return 1;
}

/* The boundaries that a list or tuple of ints holds, from 0 to numel, in new memory; else NULL. */
static int64_t *read_bounds(PyObject *given, int64_t numel, int64_t *segments)
{
    PyObject *type = PyObject_Type(given);
    Py_DecRef(type);
    if (given != py.none && type != py.tuple && type != py.list)
        return NULL;
    PyObject *bounds = given == py.none ? NULL : PySequence_Tuple(given);
    if (given != py.none && !bounds)
        return NULL;
    int64_t count = bounds ? PyTuple_Size(bounds) : 2, rises = count > 0;
    int64_t *found = malloc((count + 2) * sizeof *found);
    if (!found) {
        Py_DecRef(bounds);
        return NULL;
    }
    found[0] = 0, found[1] = numel;
    for (int64_t i = 0; bounds && i < count; i++) {
        PyObject *one = PyTuple_GetItem(bounds, i), *kind = PyObject_Type(one);
        Py_DecRef(kind);
        found[i] = kind == py.integer ? PyLong_AsLongLong(one) : -1;
        rises &= found[i] >= (i ? found[i - 1] : 0);
    }
    Py_DecRef(bounds);
    *segments = count - 1;
    if (rises && found[0] == 0 && found[count - 1] == numel)
        return found;
    free(found);
    return NULL;
}

/* What one call holds until it ends. */
struct call {
    PyObject *inputs, *out;
    int made;
    struct seen *seen;
    int64_t *bounds;
    void **addresses;
    double *scratch;
};

/* An output, made as kernels/arguments.py makes it. */
static PyObject *make(int takes, PyObject *first, PyObject *dtype, int64_t rows)
{
    if (!(takes & (PACKED | ROWS))) {
        PyObject *given[] = {first, dtype, py.contiguous};
        return PyObject_Vectorcall(py.empty_like, given, 1, py.like_names);
    }
    PyObject *length = PyLong_FromLongLong(rows), *three = PyLong_FromLongLong(3);
    PyObject *flat[] = {length, dtype, py.cpu}, *table[] = {length, three};
    PyObject *made = takes & ROWS ? PyObject_Vectorcall(py.new_rows, table, 2, NULL)
                                  : PyObject_Vectorcall(py.empty, flat, 1, py.empty_names);
    Py_DecRef(length);
    Py_DecRef(three);
    return made;
}

/* Whether a tensor may be written: in inference mode alone, if it was made there. */
static int may_be_written(PyObject *tensor)
{
    int64_t inside = ask(py.is_inference, tensor, truth);
    return inside == 0 || (inside == 1 && tell(py.is_inference_mode_enabled) == 1);
}

/* Whether derivatives in forward mode are on, which make another primal of any tensor. */
static int in_dual_level(PyObject *out)
{
    PyObject *both = PyObject_Vectorcall(py.unpack_dual, &out, 1, NULL);
    int apart = !both || PyTuple_GetItem(both, 0) != out;
    Py_DecRef(both);
    return apart;
}

/* Fills the call in; 0 where Python is to decide. layout: count, numel, the elements of each tensor,
 * where the slots start and end, and of each tensor the number of its dimensions and these. */
static int prepare(struct call *c, int takes, PyObject *dtype, PyObject *bounds, struct task *t)
{
    const int64_t *layout = takes & PACKED ? PyLong_AsVoidPtr(bounds) : NULL, *sizes = NULL;
    int64_t count = PyTuple_Size(c->inputs), following = tell(py.is_grad_enabled);
    if (count < 1 || following < 0 || (takes & PACKED && (!layout || layout[0] != count)))
        return 0;
    c->seen = malloc(count * sizeof *c->seen);
    c->addresses = malloc(2 * count * sizeof *c->addresses);
    if (!c->seen || !c->addresses)
        return 0;
    struct seen *seen = c->seen, out = {0};
    int64_t *dtypes = (int64_t *)(c->addresses + count);
    if (layout)
        sizes = layout + 3 + 2 * count;
    for (int64_t i = 0; i < count; i++) {
        PyObject *tensor = PyTuple_GetItem(c->inputs, i);
        if (!see(tensor, seen + i) || (takes & ALIKE && seen[i].dtype != seen->dtype) ||
            !same_shape(seen + i, sizes ? *sizes : seen->ndim, sizes ? sizes + 1 : seen->shape) ||
            !has_memory(tensor, following, seen + i) ||
            (takes & UNPACKS && !may_be_written(tensor)))
            return 0;
        c->addresses[i] = seen[i].data;
        dtypes[i] = seen[i].dtype;
        if (sizes)
            sizes += 1 + *sizes;
    }
    if (!layout && !(c->bounds = read_bounds(bounds, seen->numel, &t->segments)))
        return 0;
    int64_t rows = layout ? layout[1] : t->segments;
    c->made = c->out == py.none && !(takes & UNPACKS);
    if (c->made) {
        Py_DecRef(c->out);
        c->out = make(takes, PyTuple_GetItem(c->inputs, 0), dtype, rows);
    }
    if (!c->out || !see(c->out, &out) || in_dual_level(c->out) ||
        (dtype != py.none && dtype != py.dtypes[out.dtype]))
        return 0;
    if (!c->made && (!has_memory(c->out, following, &out) ||
                     (!(takes & UNPACKS) && !may_be_written(c->out))))
        return 0;
    const int64_t shape[] = {rows, 3};
    int fits = layout         ? same_shape(&out, 1, shape)
               : takes & ROWS ? out.dtype == FLOAT64 && same_shape(&out, 2, shape)
                              : same_shape(&out, seen->ndim, seen->shape);
    if (!fits || (takes & OUT_ALIKE && out.dtype != seen->dtype))
        return 0;
    for (int64_t i = 0; i < count; i++)
        if (overlap(&out, seen + i) && !(out.data == seen[i].data && out.bytes == seen[i].bytes &&
                                         !(takes & (PACKED | ROWS))))
            return 0;
    int wide = seen->dtype == FLOAT64 || out.dtype == FLOAT64;
    t->tensors = c->addresses, t->dtypes = dtypes, t->count = count;
    t->out = out.data, t->out_dtype = out.dtype;
    t->bounds = c->bounds, t->accumulate = wide ? FLOAT64 : FLOAT32;
    if (layout) {
        t->numels = layout + 2, t->bounds = layout + 2 + count, t->segments = count;
        t->packing = !(takes & UNPACKS);
    }
    return !(takes & UNPACKS) || disjoint(seen, count);
}

/* Run without the lock that Python's threads share. */
static int run_task(struct call *c, const struct function *f, double first, double second,
                    struct task *t)
{
    int64_t segments = t->segments, own = f->run == adasum ? 3 * segments : 0;
    int64_t blocks = f->takes & CUT ? t->bounds[segments] / BLOCK + segments : 0;
    int64_t factors = 2 * (segments > 1 ? segments : 1);
    c->scratch = malloc((factors + own + 3 * blocks) * sizeof *c->scratch);
    if (!c->scratch)
        return 0;
    c->scratch[0] = first, c->scratch[1] = second;
    t->coefficients = c->scratch;
    t->dots = own ? c->scratch + factors : t->out;
    t->partials = c->scratch + factors + own;
    t->threads = 1;
    if (t->bounds[segments] > ALONE) {
        t->threads = tell(py.get_num_threads);
        t->parallel = (run_in_team *)PyLong_AsVoidPtr(py.parallel);
        t->thread_num = (count_threads *)PyLong_AsVoidPtr(py.thread_num);
        t->num_threads = (count_threads *)PyLong_AsVoidPtr(py.num_threads);
    }
    if (t->threads < 0)
        return 0;
    PyThreadState *state = PyEval_SaveThread();
    f->run(t);
    PyEval_RestoreThread(state);
    return 1;
}

/* Arguments: list or tuple of tensors, out, its dtype, two scalars, segments or the address of a
 * layout, and any that have to be None. Returns what is written; None where Python is to decide. */
static PyObject *run_call(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    const struct function *f = functions + PyLong_AsLongLong(self);
    PyObject *type = PyObject_Type(arguments[0]), *result = NULL;
    struct call c = {.out = arguments[1]};
    struct task t = {0};
    int takes = f->takes, plain = type == py.list || type == py.tuple, done = 0;
    Py_IncRef(c.out);
    Py_DecRef(type);
    for (Py_ssize_t i = 6; i < count; i++)
        plain &= arguments[i] == py.none;
    if (plain && (c.inputs = PySequence_Tuple(arguments[0]))) {
        double first = PyFloat_AsDouble(arguments[3]), second = PyFloat_AsDouble(arguments[4]);
        done = prepare(&c, takes, arguments[2], arguments[5], &t) &&
               run_task(&c, f, first, second, &t);
    }
    if (done) {
        /* Autograd does not see writes to what was there: kernels/binding.py says more. */
        PyObject *written = takes & UNPACKS ? c.inputs : c.out;
        PyObject *told = NULL;
        if (!c.made)
            told = PyObject_Vectorcall(py.increment_version, &written, 1, NULL);
        if (told || c.made)
            result = takes & UNPACKS ? PySequence_List(c.inputs) : c.out;
        if (result == c.out)
            Py_IncRef(result);
        Py_DecRef(told);
    } else if (!PyErr_Occurred() || PyErr_ExceptionMatches(py.exception)) {
        PyErr_Clear();
        result = py.none;
        Py_IncRef(result);
    }
    Py_DecRef(c.out);
    Py_DecRef(c.inputs);
    free(c.seen);
    free(c.bounds);
    free(c.addresses);
    free(c.scratch);
    return result;
}

/* The call of each function, by its number in `functions`; NULL with an exception where torch does
 * not lend tensors as DLPack 1 does. handles: a tuple with the fields of `py`, which it keeps. */
PyObject *direct_call(PyObject *handles, int64_t function)
{
    static PyMethodDef method = {"run_call", run_call, METH_FASTCALL, NULL};
    PyObject **field = (PyObject **)&py;
    for (Py_ssize_t i = 0; i < (Py_ssize_t)(sizeof py / sizeof *field); i++)
        if (!(field[i] = PyTuple_GetItem(handles, i)))
            return NULL;
    Py_IncRef(handles);
    exchange = PyCapsule_GetPointer(py.capsule, "dlpack_exchange_api");
    if (!exchange)
        return NULL;
    if (exchange->major != 1 || !exchange->lend) {
        PyErr_SetString(py.exception, "torch lends no tensors as DLPack 1 does");
        return NULL;
    }
    PyObject *number = PyLong_FromLongLong(function), *made = NULL;
    if (number)
        made = PyCFunction_NewEx(&method, number, NULL);
    Py_DecRef(number);
    return made;
}
