/* Check the arguments of a call in one pass, for the common case: plain tensors on one device,
 * without derivatives.
 *
 * All arguments accepted here are accepted by the checks in Python, too. Other calls are left to
 * those checks, which describe errors and accept rare cases. Nothing is written here.
 * tests/kernels/cpu/test_calls.py compares each verdict with Python's.
 */
#include "interfaces.h"

#include <stdlib.h>

/* Properties of a function's arguments. ALIKE: the tensors have one dtype; OUT_ALIKE: the output
 * has that dtype, too; CUT: segments; PACKED: the slots of a layout. ROWS, MATRICES: the output is
 * rows of dot products or matrices; UNPACKS: it is the tensors. DOTS, FACTORS: it reads a float64
 * table of rows of dot products or of the tensors' factors. ORDERED: a sum's order. JOINS: the
 * input is matrices; only Python reads its arguments. */
enum {
    ALIKE = 1, OUT_ALIKE = 2, CUT = 4, PACKED = 8, ROWS = 16, MATRICES = 32, UNPACKS = 64,
    DOTS = 128, FACTORS = 256, ORDERED = 512, JOINS = 1024
};
static const struct function {
    void (*run)(const struct task *);
    int takes;
} functions[] = {
    /* In the order of FUNCTIONS in kernels/call.py. */
    {copy, PACKED},
    {copy, PACKED | UNPACKS},
    {sum_n, ALIKE | ORDERED},
    {scaled_add, 0},
    {dot_and_norms, ALIKE | CUT | ROWS},
    {combine, ALIKE | OUT_ALIKE | CUT | DOTS},
    {adasum, ALIKE | OUT_ALIKE | CUT},
    {gram, ALIKE | CUT | MATRICES},
    {adasum_coefficients, JOINS},
    {weighted_sum, ALIKE | OUT_ALIKE | CUT | FACTORS},
};
/* The arguments of each function, in order. KIND: a sum's order, or whether a matrix is precise. */
enum {
    TENSORS, OUT, DTYPE, FIRST, SECOND, BOUNDS, FOUND_INF, TABLE, KIND, ACCUMULATE, ARGUMENTS
};
/* Tensors of a list of so many are asked for their storages all at once. */
enum { MANY = 32 };
/* Python objects that native.py passes, in its order: functions to query and make tensors. */
static struct {
    PyObject *none, *tensor, *parameter, *list, *tuple, *integer, *text, *exception;
    PyObject *layout, *in_one, *call, *array, *uint64, *storages;
    PyObject *is_neg, *is_inference, *untyped_storage, *storage_offset, *requires_grad;
    PyObject *is_grad_enabled, *is_inference_mode_enabled, *unpack_dual;
    PyObject *increment_version, *get_num_threads;
    PyObject *new_empty, *new_names, *empty_like, *like_names, *contiguous, *preserve;
    PyObject *dtypes[4];
    PyObject *capsule;
} py;
static const DLPackExchangeAPI *exchange;
/* Functions whose addresses native.py finds. */
static struct {
    TorchStableABI abi;
    run_in_team *parallel;
    count_threads *thread_num, *num_threads;
} torch;

struct seen {
    char *data;
    int64_t numel, bytes, dtype;
    int64_t device;
    int64_t ndim;
    const int64_t *shape;
    /* NULL if the tensor is contiguous. */
    const int64_t *strides;
};

/* A tensor's address, the elements of its storage before it, and the bytes of the storage. */
struct storage {
    void *data;
    int64_t start, held;
};

/* The state of one call until it ends. others: found_inf and the table. */
struct call {
    PyObject *inputs, *out, *cuts;
    int takes, made;
    struct seen *seen, written, others[2];
    struct storage *storages;
    int64_t *bounds;
    void **addresses;
};

/* Call a tensor's method without arguments; return the result as a number, -1 with an exception. */
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

/* Call a function without arguments; return the result, -1 with an exception. */
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

static int is_of(PyObject *one, PyObject *type)
{
    PyObject *its = PyObject_Type(one);
    Py_DecRef(its);
    return its == type;
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

/* Whether a tensor is contiguous once its dimensions are permuted, as in torch.channels_last. */
static int fills_memory(const DLTensor *t, int64_t numel)
{
    int64_t step = 1;
    for (int found = 1; found;) {
        found = 0;
        for (int i = 0; i < t->ndim && !found; i++)
            if (t->shape[i] != 1 && t->strides[i] == step) {
                step *= t->shape[i];
                found = 1;
            }
    }
    return step == numel;
}

/* Describe a tensor in `s`; return whether it is plain, fills its memory and is on the CPU or a
 * GPU. */
static int see(PyObject *tensor, struct seen *s)
{
    PyObject *type = PyObject_Type(tensor);
    DLTensor t;
    Py_DecRef(type);
    if ((type != py.tensor && type != py.parameter) || exchange->lend(tensor, &t))
        return 0;
    int on_gpu = t.device_type == DLPACK_CUDA || t.device_type == DLPACK_ROCM;
    int dtype = on_gpu || t.device_type == DLPACK_CPU ? dtype_of(&t) : -1;
    if (dtype < 0)
        return 0;
    int64_t step = 1, dense = 1;
    for (int i = t.ndim - 1; i >= 0; i--) {
        dense &= t.shape[i] == 1 || t.strides[i] == step;
        step *= t.shape[i];
    }
    dense |= step == 0;
    if (!dense && !fills_memory(&t, step))
        return 0;
    *s = (struct seen){.data = (char *)t.data + t.byte_offset, .numel = step, .dtype = dtype,
                       .device = on_gpu ? t.device_id : -1, .ndim = t.ndim, .shape = t.shape,
                       .strides = dense ? NULL : t.strides};
    s->bytes = bytes_of(dtype, step);
    return 1;
}

/* The operator adasum::storages(Tensor[] tensors, int to) -> (): write a `struct storage` for each
 * tensor to an address. torch passes copies of tensors whose memory does not hold their values,
 * such as negative views: these have other addresses. */
void write_storages(void **stack, uint64_t arguments, uint64_t results)
{
    void *list = stack[0], *tensor;
    struct storage *to = stack[1];
    size_t count = 0;
    (void)arguments, (void)results;
    /* Otherwise torch would take and release Python's lock for each tensor that is deleted. */
    int state = PyGILState_Ensure();
    torch.abi.list_size(list, &count);
    for (size_t i = 0; i < count && !torch.abi.list_item(list, i, &tensor); i++) {
        if (torch.abi.data_of(tensor, &to[i].data) || torch.abi.offset_of(tensor, &to[i].start) ||
            torch.abi.storage_of(tensor, &to[i].held))
            to[i].held = -1;
        torch.abi.delete_tensor(tensor);
    }
    torch.abi.delete_list(list);
    PyGILState_Release(state);
}

/* Read the storages of a tuple of tensors by the operator; return 0, maybe with an exception, if
 * that fails. */
static int read_storages(struct call *c, int64_t count)
{
    if (!(c->storages = calloc(count, sizeof *c->storages)))
        return 0;
    for (int64_t i = 0; i < count; i++)
        c->storages[i].held = -1;
    PyObject *to = PyLong_FromLongLong((intptr_t)c->storages), *given[] = {c->inputs, to};
    PyObject *done = to ? PyObject_Vectorcall(py.storages, given, 2, NULL) : NULL;
    Py_DecRef(to);
    Py_DecRef(done);
    return done != NULL;
}

/* Read a tensor's storage by its methods; return 0, maybe with an exception, if its memory does
 * not hold its values. */
static int read_storage(PyObject *tensor, const struct seen *s, struct storage *found)
{
    if (ask(py.is_neg, tensor, truth) != 0)
        return 0;
    found->data = s->data;
    found->held = ask(py.untyped_storage, tensor, length);
    found->start = found->held < 0 ? -1 : ask(py.storage_offset, tensor, number);
    return found->start >= 0;
}

/* Whether a tensor's storage, which is read unless it is given, holds the elements of its
 * description and, if grad mode is on (`following`), it requires no gradient. */
static int has_memory(PyObject *tensor, int following, const struct seen *s,
                      const struct storage *given)
{
    struct storage read;
    if (following) {
        PyObject *asks = PyObject_GetAttr(tensor, py.requires_grad);
        int64_t yes = asks ? PyObject_IsTrue(asks) : -1;
        Py_DecRef(asks);
        if (yes != 0)
            return 0;
    }
    if (!given && !read_storage(tensor, s, &read))
        return 0;
    const struct storage *found = given ? given : &read;
    if (s->numel == 0)
        return found->held >= 0;
    int64_t start = bytes_of(s->dtype, found->start);
    return found->data == s->data && (uintptr_t)s->data != (uintptr_t)start &&
           start + s->bytes <= found->held;
}

/* Whether a tensor is contiguous and has this shape. */
static int has_shape(const struct seen *s, int64_t ndim, const int64_t *shape)
{
    return s->ndim == ndim && !s->strides &&
           (ndim == 0 || !memcmp(s->shape, shape, ndim * sizeof *shape));
}

/* Whether tensors are equal in shape and in one order in memory. */
static int is_like(const struct seen *s, const struct seen *other)
{
    int equal = s->ndim == other->ndim && !s->strides == !other->strides;
    for (int i = 0; equal && i < s->ndim; i++)
        equal = s->shape[i] == other->shape[i] &&
                (!s->strides || s->shape[i] == 1 || s->strides[i] == other->strides[i]);
    return equal;
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

/* Sort the tensors by address; return whether no two of them share memory. */
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

/* Read boundaries from 0 to numel from a list or tuple of ints; return 0 if it holds anything
 * else. */
static int read_bounds(struct call *c, PyObject *given, int64_t numel, int64_t *segments)
{
    if (given != py.none) {
        if (!is_of(given, py.tuple) && !is_of(given, py.list))
            return 0;
        if (!(c->cuts = PySequence_Tuple(given)))
            return 0;
    }
    int64_t count = c->cuts ? PyTuple_Size(c->cuts) : 2, rises = count > 0;
    int64_t *found = c->bounds = malloc((count + 2) * sizeof *found);
    if (!found)
        return 0;
    found[0] = 0, found[1] = numel;
    for (int64_t i = 0; c->cuts && i < count; i++) {
        PyObject *one = PyTuple_GetItem(c->cuts, i);
        found[i] = is_of(one, py.integer) ? PyLong_AsLongLong(one) : -1;
        rises &= found[i] >= (i ? found[i - 1] : 0);
    }
    *segments = count - 1;
    return rises && found[0] == 0 && found[count - 1] == numel;
}

/* Write the shape of an output or table whose shape differs from the tensors'; return its number
 * of dimensions. */
static int shape_of(int takes, int64_t rows, int64_t count, int precise, int64_t shape[4])
{
    int matrices = takes & MATRICES;
    shape[0] = rows, shape[1] = matrices || takes & FACTORS ? count : 3;
    shape[2] = count, shape[3] = 2;
    return takes & PACKED ? 1 : matrices ? 3 + precise : 2;
}

/* Make an output as kernels/arguments.py does: of this shape, or if ndim is 0 like the first
 * tensor, which may be `contiguous`. */
static PyObject *make(int ndim, const int64_t *shape, PyObject *first, int contiguous,
                      PyObject *dtype)
{
    if (!ndim) {
        PyObject *given[] = {first, dtype, contiguous ? py.contiguous : py.preserve};
        return PyObject_Vectorcall(py.empty_like, given, 1, py.like_names);
    }
    PyObject *given[6] = {first}, *made = NULL;
    int ready = 1;
    for (int i = 1; i <= ndim; i++)
        ready &= (given[i] = PyLong_FromLongLong(shape[i - 1])) != NULL;
    given[ndim + 1] = dtype == py.none ? py.dtypes[FLOAT64] : dtype;
    if (ready)
        made = PyObject_Vectorcall(py.new_empty, given, ndim + 1, py.new_names);
    for (int i = 1; i <= ndim; i++)
        Py_DecRef(given[i]);
    return made;
}

/* Whether a tensor may be written: if it was made in inference mode, only in that mode. */
static int may_be_written(PyObject *tensor)
{
    int64_t inside = ask(py.is_inference, tensor, truth);
    return inside == 0 || (inside == 1 && tell(py.is_inference_mode_enabled) == 1);
}

/* Whether forward-mode derivatives are on: any tensor then has a primal that is another object. */
static int in_dual_level(PyObject *out)
{
    PyObject *both = PyObject_Vectorcall(py.unpack_dual, &out, 1, NULL);
    int apart = !both || PyTuple_GetItem(both, 0) != out;
    Py_DecRef(both);
    return apart;
}

/* Read the other tensors: found_inf, and the table of this shape. The descriptions of missing ones
 * have no bytes. */
static int read_others(struct call *c, PyObject *const *given, int following, int64_t ndim,
                       const int64_t *shape)
{
    const int64_t count = PyTuple_Size(c->inputs);
    for (int i = 0; i < 2; i++) {
        PyObject *tensor = given[FOUND_INF + i];
        struct seen *s = c->others + i;
        int is_table = FOUND_INF + i == TABLE;
        if (tensor == py.none && !(is_table && c->takes & (DOTS | FACTORS)))
            continue;
        if ((is_table && !(c->takes & (DOTS | FACTORS))) || !see(tensor, s) ||
            s->device != c->seen->device || s->dtype != (is_table ? FLOAT64 : FLOAT32) ||
            !(is_table ? has_shape(s, ndim, shape) : s->numel == 1) ||
            !has_memory(tensor, following, s, NULL) || (!is_table && !may_be_written(tensor)) ||
            overlap(s, &c->written))
            return 0;
        if (is_table && overlap(s, c->others))
            return 0;
        for (int k = 0; !is_table && k < count; k++)
            if (overlap(s, c->seen + k))
                return 0;
    }
    return 1;
}

/* Read a sum's order and the dtype that each sum of two is rounded to; or whether a matrix is
 * precise. */
static int read_kind(int takes, PyObject *const *given, int64_t dtype, int wide, struct task *t)
{
    PyObject *kind = given[KIND], *rounded = given[ACCUMULATE];
    t->accumulate = wide ? FLOAT64 : FLOAT32;
    if (takes & MATRICES)
        return (t->precise = PyObject_IsTrue(kind)) >= 0;
    if (!(takes & ORDERED))
        return 1;
    if (!is_of(kind, py.text))
        return 0;
    t->balanced = !PyUnicode_CompareWithASCIIString(kind, "tree");
    if (!t->balanced && PyUnicode_CompareWithASCIIString(kind, "list"))
        return 0;
    if (rounded == py.none)
        return 1;
    t->accumulate = rounded == py.dtypes[dtype] ? dtype : FLOAT32;
    return rounded == py.dtypes[t->accumulate] && (dtype != FLOAT64 || t->accumulate == FLOAT64);
}

/* Return the description of a layout, which keeps it, or NULL if it is not sound. */
static const int64_t *layout_at(PyObject *layout)
{
    PyObject *bytes = is_of(layout, py.layout) ? PyObject_GetAttr(layout, py.in_one) : NULL;
    const char *found = bytes && PyObject_Size(bytes) > 0 ? PyBytes_AsString(bytes) : NULL;
    Py_DecRef(bytes);
    return (const int64_t *)found;
}

/* Read the descriptions of the inputs; return 0 if they differ in what must be equal. sizes: Each
 * tensor's number of dimensions and shape; NULL for equal shapes. */
static int read_inputs(struct call *c, int64_t count, const int64_t *sizes)
{
    struct seen *first = c->seen;
    for (int64_t i = 0; i < count; i++) {
        struct seen *s = first + i;
        if (!see(PyTuple_GetItem(c->inputs, i), s) || s->device != first->device ||
            (c->takes & ALIKE && s->dtype != first->dtype) ||
            !(sizes ? has_shape(s, *sizes, sizes + 1) : is_like(s, first)))
            return 0;
        if (sizes)
            sizes += 1 + *sizes;
    }
    return count < MANY || read_storages(c, count);
}

/* Fill in the call and the task; return 0 if Python is to decide. layout: count, numel, the number
 * of the dtype, the elements of each tensor, the boundaries of the slots, and each tensor's number
 * of dimensions and shape. */
static int read_call(struct call *c, PyObject *const *given, struct task *t)
{
    const int takes = c->takes;
    const int64_t *layout = takes & PACKED ? layout_at(given[BOUNDS]) : NULL;
    PyObject *dtype = layout ? py.dtypes[layout[2]] : given[DTYPE];
    int64_t count = PyTuple_Size(c->inputs), following = tell(py.is_grad_enabled), widest = 0;
    if (count < 1 || following < 0 || (takes & PACKED && (!layout || layout[0] != count)))
        return 0;
    struct seen *seen = c->seen = malloc(count * sizeof *c->seen), *out = &c->written;
    c->addresses = malloc(2 * count * sizeof *c->addresses);
    if (!seen || !c->addresses || !read_inputs(c, count, layout ? layout + 4 + 2 * count : NULL))
        return 0;
    int64_t *dtypes = (int64_t *)(c->addresses + count);
    for (int64_t i = 0; i < count; i++) {
        PyObject *tensor = PyTuple_GetItem(c->inputs, i);
        if (!has_memory(tensor, following, seen + i, c->storages ? c->storages + i : NULL) ||
            (takes & UNPACKS && !may_be_written(tensor)))
            return 0;
        c->addresses[i] = seen[i].data;
        dtypes[i] = seen[i].dtype;
        widest = seen[i].dtype > widest ? seen[i].dtype : widest;
    }
    if (!layout && (!read_bounds(c, given[BOUNDS], seen->numel, &t->segments) ||
                    (seen->strides && t->segments != 1)))
        return 0;
    if (!read_kind(takes, given, seen->dtype, widest == FLOAT64, t))
        return 0;
    int64_t rows = layout ? layout[1] : t->segments, shape[4];
    int ndim = shape_of(takes, rows, count, t->precise, shape);
    int own = takes & (PACKED | ROWS | MATRICES) ? ndim : 0;
    c->made = c->out == py.none && !(takes & UNPACKS);
    if (c->made) {
        Py_DecRef(c->out);
        c->out = make(own, shape, PyTuple_GetItem(c->inputs, 0), !seen->strides, dtype);
    }
    if (!c->out || !see(c->out, out) || out->device != seen->device || in_dual_level(c->out) ||
        (dtype != py.none && dtype != py.dtypes[out->dtype]))
        return 0;
    if (!c->made && (!has_memory(c->out, following, out, NULL) ||
                     (!(takes & UNPACKS) && !may_be_written(c->out))))
        return 0;
    if (!(own ? has_shape(out, own, shape) : is_like(out, seen)) ||
        (takes & OUT_ALIKE && out->dtype != seen->dtype) ||
        (takes & (ROWS | MATRICES) && out->dtype != FLOAT64))
        return 0;
    for (int64_t i = 0; i < count; i++)
        if (overlap(out, seen + i) &&
            (own || out->data != seen[i].data || out->bytes != seen[i].bytes))
            return 0;
    if (!read_others(c, given, following, ndim, shape))
        return 0;
    if (out->dtype == FLOAT64 && given[ACCUMULATE] == py.none)
        t->accumulate = FLOAT64;
    t->tensors = c->addresses, t->dtypes = dtypes, t->count = count;
    t->out = out->data, t->out_dtype = out->dtype;
    t->found_inf = (float *)c->others[0].data, t->table = (double *)c->others[1].data;
    t->bounds = c->bounds;
    if (layout) {
        t->numels = layout + 3, t->bounds = layout + 3 + count, t->segments = count;
        t->packing = !(takes & UNPACKS);
    }
    return !(takes & UNPACKS) || disjoint(seen, count);
}
