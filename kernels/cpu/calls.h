/* Direct calls in one pass: check the arguments, bind them and run the function; or return them as
 * a kernels.call.Call, for a plan or a launch on a GPU.
 */
#include "reading.h"

/* Run a task's function with memory for its factors, partial sums and dots; return 0 if there is
 * none. */
int run_task(struct task *t)
{
    const struct function *f = functions + t->function;
    int64_t size = t->count, segments = t->segments, factors = 2 * (segments > 1 ? segments : 1);
    int64_t own = f->run == adasum ? 3 * segments : 0, room = 0;
    int64_t entries = f->takes & MATRICES ? size * (size + 1) / 2 * (1 + t->precise) : 3;
    if (f->takes & CUT)
        room = entries * (t->bounds[segments] / BLOCK + segments);
    else if (f->takes & JOINS)
        /* For four segments at once: matrix and factors in double-double, lengths; places. */
        room = 4 * (2 * size * size + 2 * size + size) + size;
    double *scratch = malloc((factors + own + room) * sizeof *scratch);
    if (!scratch)
        return 0;
    scratch[0] = t->first, scratch[1] = t->second;
    t->coefficients = f->takes & FACTORS ? t->table : scratch;
    t->partials = scratch + factors + own;
    t->dots = f->takes & DOTS ? t->table : own ? scratch + factors : t->out;
    f->run(t);
    free(scratch);
    return 1;
}

/* Run a direct call without the lock that Python's threads share. Return 0 if that fails. */
static int run_unlocked(struct task *t, PyObject *const *given)
{
    t->first = PyFloat_AsDouble(given[FIRST]), t->second = PyFloat_AsDouble(given[SECOND]);
    t->threads = 1;
    if (t->bounds[t->segments] > ALONE) {
        t->threads = tell(py.get_num_threads);
        t->parallel = torch.parallel;
        t->thread_num = torch.thread_num;
        t->num_threads = torch.num_threads;
    }
    if (t->threads < 0)
        return 0;
    PyThreadState *state = PyEval_SaveThread();
    int done = run_task(t);
    PyEval_RestoreThread(state);
    return done;
}

/* Count a write to a tensor, or to each one of a tuple, since autograd does not see it:
 * kernels/binding.py says more. */
static int count_write(PyObject *written)
{
    PyObject *told = PyObject_Vectorcall(py.increment_version, &written, 1, NULL);
    Py_DecRef(told);
    return told != NULL;
}

/* Count the writes, and return the tensors that were written. */
static PyObject *result_of(struct call *c, PyObject *const *given)
{
    int unpacks = c->takes & UNPACKS;
    if (given[FOUND_INF] != py.none && !count_write(given[FOUND_INF]))
        return NULL;
    if (!c->made && !count_write(unpacks ? c->inputs : c->out))
        return NULL;
    if (unpacks)
        return PySequence_List(c->inputs);
    Py_IncRef(c->out);
    return c->out;
}

/* Return a kernels.call.Call of the arguments, whose first fields are in this order. */
static PyObject *call_of(struct call *c, PyObject *name, PyObject *const *given,
                         const struct task *t)
{
    uintptr_t places = (uintptr_t)t->out;
    char *codes = malloc(t->count);
    for (int64_t i = 0; codes && i < t->count; i++)
        codes[i] = t->dtypes[i], places |= (uintptr_t)c->addresses[i];
    PyObject *inputs = PySequence_List(c->inputs), *made = PyBool_FromLong(c->made);
    PyObject *aligned = PyBool_FromLong(places % 16 == 0);
    PyObject *bytes = PyBytes_FromStringAndSize((char *)c->addresses, 8 * t->count);
    PyObject *dtypes = codes ? PyBytes_FromStringAndSize(codes, t->count) : NULL, *call = NULL;
    PyObject *typed[] = {py.uint64, bytes};
    PyObject *addresses = bytes ? PyObject_Vectorcall(py.array, typed, 2, NULL) : NULL;
    PyObject *all[] = {
        name, inputs, c->out, c->cuts ? c->cuts : given[BOUNDS], made, addresses, aligned, dtypes,
        given[FOUND_INF], given[TABLE], given[KIND], given[ACCUMULATE],
    };
    if (inputs && made && addresses && aligned && dtypes)
        call = PyObject_Vectorcall(py.call, all, sizeof all / sizeof *all, NULL);
    free(codes);
    Py_DecRef(inputs);
    Py_DecRef(made);
    Py_DecRef(bytes);
    Py_DecRef(addresses);
    Py_DecRef(aligned);
    Py_DecRef(dtypes);
    return call;
}

/* Check a call. If its tensors are on the CPU, run it and return its output; otherwise, and if it
 * only `reads`, return it as a Call. Return None if Python is to decide. Missing arguments at the
 * end are None. self: The function's number and name. */
static PyObject *take(PyObject *self, int reads, PyObject *const *arguments, Py_ssize_t count)
{
    int64_t function = PyLong_AsLongLong(PyTuple_GetItem(self, 0));
    PyObject *given[ARGUMENTS], *result = NULL;
    for (int i = 0; i < ARGUMENTS; i++)
        given[i] = i < count ? arguments[i] : py.none;
    struct call c = {.out = given[OUT], .takes = functions[function].takes};
    struct task t = {.function = function};
    int done = 0;
    Py_IncRef(c.out);
    if ((is_of(given[TENSORS], py.list) || is_of(given[TENSORS], py.tuple)) &&
        (c.inputs = PySequence_Tuple(given[TENSORS])))
        done = read_call(&c, given, &t);
    if (done && (reads || c.seen->device >= 0))
        result = call_of(&c, PyTuple_GetItem(self, 1), given, &t);
    else if (done && run_unlocked(&t, given))
        result = result_of(&c, given);
    else if (!PyErr_Occurred() || PyErr_ExceptionMatches(py.exception)) {
        PyErr_Clear();
        result = py.none;
        Py_IncRef(result);
    }
    Py_DecRef(c.out);
    Py_DecRef(c.inputs);
    Py_DecRef(c.cuts);
    free(c.seen);
    free(c.storages);
    free(c.bounds);
    free(c.addresses);
    return result;
}

static PyObject *run_call(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    return take(self, 0, arguments, count);
}

static PyObject *read_only(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    return take(self, 1, arguments, count);
}

/* Return a Python function that runs calls of `functions[number]`, or only `reads` them; NULL with
 * an exception if torch does not lend tensors as DLPack 1 does, and in Python 3.10. handles: A
 * tuple with the fields of `py`; it is kept alive. addresses: The fields of `torch`. self: The
 * function's number and name. */
PyObject *direct_call(PyObject *handles, const void *addresses, PyObject *self, int64_t reads)
{
    static PyMethodDef methods[] = {{"run_call", run_call, METH_FASTCALL, NULL},
                                    {"read_only", read_only, METH_FASTCALL, NULL}};
    PyObject **field = (PyObject **)&py;
    for (Py_ssize_t i = 0; i < (Py_ssize_t)(sizeof py / sizeof *field); i++)
        if (!(field[i] = PyTuple_GetItem(handles, i)))
            return NULL;
    Py_IncRef(handles);
    memcpy(&torch, addresses, sizeof torch);
    exchange = PyCapsule_GetPointer(py.capsule, "dlpack_exchange_api");
    if (!exchange)
        return NULL;
    if (exchange->major != 1 || !exchange->lend || !PyObject_Vectorcall) {
        PyErr_SetString(py.exception, "it takes DLPack 1 and Python 3.11");
        return NULL;
    }
    return PyCFunction_NewEx(methods + reads, self, NULL);
}
