/* Calls that were made before, recognised without Python: what KnownCalls.checked (kernels/_known.py)
 * does where it finds one; and, on CPU tensors, made again.
 *
 * Nothing here says what is wrong with a call: where in doubt the answer is None, nothing has been
 * written, and Python begins anew.
 */
#include "_recall.h"

/* "Not known", also after an error: Python will meet it again where it can be explained. */
static PyObject *unknown(void)
{
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return NULL;
        PyErr_Clear();
    }
    Py_RETURN_NONE;
}

static int takes(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given != wanted)
        PyErr_Format(PyExc_TypeError, "takes %zd arguments, not %zd", wanted, given);
    return given == wanted;
}

/* recognise(calls, key, inputs, others, out, beside): (a Known, its Place or None), or None. inputs: a
 * list that nobody else has, or a tuple; others: a tuple. */
static PyObject *recognise(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (!takes(nargs, 6))
        return NULL;
    PyObject *inputs = args[2], *others = args[3];
    if (!PyTuple_CheckExact(others) || PyTuple_GET_SIZE(others) > OTHERS)
        return unknown();
    if (!PyTuple_CheckExact(inputs) && !PyList_CheckExact(inputs))
        return unknown();
    struct call call;
    int found = find(&call, args[0], args[1], PySequence_Fast_ITEMS(inputs),
                     PySequence_Fast_GET_SIZE(inputs), PySequence_Fast_ITEMS(others),
                     PyTuple_GET_SIZE(others), args[4], args[5], 0);
    PyObject *answer = found == 1 ? PyTuple_Pack(2, call.known, call.place) : unknown();
    leave(&call);
    return answer;
}

/* Run the task, which reads so many elements, and hand on `answer`, a reference of the caller's; "not
 * known" where that is NULL. threads: the task's. The `count` tensors `written` are the user's. */
static PyObject *run(const struct call *call, const struct job *taken, const void *task,
                     int64_t elements, int64_t *threads, PyObject *answer,
                     PyObject *const *written, Py_ssize_t count)
{
    *threads = answer ? threads_for(elements) : -1;
    if (*threads < 0) {
        Py_XDECREF(answer);
        return unknown();
    }
    if (*threads == 0)
        taken->function(task);
    else {
        Py_BEGIN_ALLOW_THREADS
        taken->function(task);
        Py_END_ALLOW_THREADS
    }
    if (mark_written(call, written, count) < 0)
        Py_CLEAR(answer);
    return answer;
}

static int as_double(PyObject *value, double *number)
{
    if (!PyFloat_CheckExact(value) && !PyLong_CheckExact(value))
        return 0;
    *number = PyFloat_AsDouble(value);
    return *number == -1.0 && PyErr_Occurred() ? -1 : 1;
}

/* The tensors as they are now: another thread may change the list. NULL for what is no list. */
static PyObject *snapshot(PyObject *tensors)
{
    if (PyTuple_CheckExact(tensors))
        return Py_NewRef(tensors);
    return PyList_CheckExact(tensors) ? PyList_AsTuple(tensors) : NULL;
}

/* sum_n(calls, dtype, tensors, scale, out, found_inf): the output, or None. */
static PyObject *sum_n(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    double scale;
    if (!takes(nargs, 6))
        return NULL;
    PyObject *inputs = as_double(args[3], &scale) == 1 ? snapshot(args[2]) : NULL;
    if (!inputs)
        return unknown();
    struct call call;
    struct job taken = {0};
    PyObject *answer = NULL;
    if (find(&call, args[0], args[1], PySequence_Fast_ITEMS(inputs), PyTuple_GET_SIZE(inputs),
             &args[5], 1, args[4], Py_None, 1) == 1
        && take_job(&call, sizeof(struct sum), &taken) == 1) {
        struct sum task = *(const struct sum *)taken.task;
        task.inputs = (const void *const *)PyBytes_AS_STRING(call.addresses);
        task.out = at(&call, call.out);
        task.scale = scale;
        task.found_inf = at(&call, call.found_inf);
        int given = call.out >= 0;
        PyObject *out = given ? Py_NewRef(args[4]) : fresh(&taken, &task.out);
        int64_t elements = task.numel * task.count;
        answer = run(&call, &taken, &task, elements, &task.threads, out, &args[4], given);
    } else
        answer = unknown();
    Py_XDECREF(taken.whole);
    leave(&call);
    Py_DECREF(inputs);
    return answer;
}

/* Coefficients whose product with any float loses nothing to its exponent. */
static int is_safe(double coefficient)
{
    double size = coefficient < 0 ? -coefficient : coefficient;
    return size == 0 || (least_safe < size && size < most_safe) || size != size;
}

/* scaled_add(calls, dtype, a, b, alpha, beta, out, found_inf): the output, or None. */
static PyObject *scaled_add(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    double coefficients[2];
    if (!takes(nargs, 8))
        return NULL;
    for (int i = 0; i < 2; i++)
        if (as_double(args[4 + i], &coefficients[i]) != 1 || !is_safe(coefficients[i]))
            return unknown();
    struct call call;
    struct job taken = {0};
    PyObject *answer = NULL;
    if (find(&call, args[0], args[1], &args[2], 2, &args[7], 1, args[6], Py_None, 1) == 1
        && take_job(&call, sizeof(struct blend), &taken) == 1) {
        struct blend task = *(const struct blend *)taken.task;
        task.a = at(&call, 0);
        task.b = at(&call, 1);
        task.out = at(&call, call.out);
        task.coefficients = coefficients;
        task.found_inf = at(&call, call.found_inf);
        int given = call.out >= 0;
        PyObject *out = given ? Py_NewRef(args[6]) : fresh(&taken, &task.out);
        answer = run(&call, &taken, &task, 2 * call.first, &task.threads, out, &args[6], given);
    } else
        answer = unknown();
    Py_XDECREF(taken.whole);
    leave(&call);
    return answer;
}

/* copy(calls, layout, tensors, scale, buffer, found_inf, packing): the buffer or, where it is not
 * packing, a list of the tensors; or None. */
static PyObject *copy(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    double scale;
    if (!takes(nargs, 7))
        return NULL;
    PyObject *inputs = as_double(args[3], &scale) == 1 ? snapshot(args[2]) : NULL;
    if (!inputs)
        return unknown();
    int packing = args[6] == Py_True;
    struct call call;
    struct job taken = {0};
    PyObject *answer = NULL, *const *tensors = PySequence_Fast_ITEMS(inputs);
    Py_ssize_t count = PyTuple_GET_SIZE(inputs);
    if (find(&call, args[0], args[1], tensors, count, &args[4], 2, Py_None, Py_None, 1) == 1
        && take_job(&call, sizeof(struct list), &taken) == 1) {
        struct list task = *(const struct list *)taken.task;
        task.tensors = (void *const *)PyBytes_AS_STRING(call.addresses);
        task.buffer = at(&call, call.other[0]);
        task.scale = scale;
        task.found_inf = at(&call, call.found_inf);
        int given = call.other[0] >= 0;
        PyObject *written;
        if (packing)
            written = given ? Py_NewRef(args[4]) : fresh(&taken, &task.buffer);
        else
            written = PySequence_List(inputs);
        answer = run(&call, &taken, &task, task.bounds[task.count], &task.threads, written,
                     packing ? &args[4] : tensors, packing ? given : count);
    } else
        answer = unknown();
    Py_XDECREF(taken.whole);
    leave(&call);
    Py_DECREF(inputs);
    return answer;
}

/* prepare(exchange_api, types, Tensor, empty_like, increment_version, get_num_threads, far, least_safe,
 * most_safe): what the functions need of torch and of the other modules. ValueError for an API of
 * another version. */
static PyObject *prepare(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *capsule;
    if (!PyArg_ParseTuple(args, "OOOOOOKdd", &capsule, &plain, &tensor_type, &empty_like,
                          &increment_version, &get_num_threads, &far, &least_safe, &most_safe))
        return NULL;
    const struct exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    while (exchange && exchange->major > 1)
        exchange = exchange->older;
    if (!exchange || exchange->major != 1 || !exchange->read) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "torch has no dlpack exchange API of version 1");
        return NULL;
    }
    read_tensor = exchange->read;
    PyObject *kept[] = {plain, (PyObject *)tensor_type, empty_like, increment_version,
                        get_num_threads};
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
        Py_INCREF(kept[i]);
    Py_RETURN_NONE;
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    {"prepare", prepare, METH_VARARGS, NULL},
    FAST(recognise),
    FAST(sum_n),
    FAST(scaled_add),
    FAST(copy),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_recall_c", .m_size = -1,
                                        .m_methods = methods};

PyMODINIT_FUNC PyInit__recall_c(void)
{
    static const struct {
        PyObject **name;
        const char *text;
    } names[] = {
        {&state, "_state"},
        {&libraries, "libraries"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].name = PyUnicode_InternFromString(names[i].text)))
            return NULL;
    return PyModule_Create(&definition);
}
