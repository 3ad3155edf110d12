/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies blocks and digests them in the same pass: each byte is loaded once, its register is both hashed and stored. And
 * receives blocks from a socket and digests what has come, without the interpreter.
 *
 * Why one pass: a copy past the caches (non-temporal stores, as the C library does it for large ones) leaves nothing in them to
 * hash; a copy through them reads the target's lines only to overwrite them, and takes half as long again. Here the
 * load from memory is the limit, and the digest and the stores are done while it waits.
 *
 * Why without the interpreter: a block takes a tenth of a millisecond, and a thread that gives the interpreter up twice
 * for each waits for the others as long again.
 *
 * The digest is XXH3-128 with the default secret and seed 0, for inputs above 240 bytes (the algorithm's specification:
 * github.com/Cyan4973/xxHash, doc/xxhash_spec.md). Shorter blocks are left to the caller.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>

#if defined(__x86_64__)
#include <immintrin.h>

enum {
    LINE = 64,               /* what one step loads, hashes and stores: a stripe of XXH3 and a line of the cache */
    LINES = 16,              /* stripes between two scrambles */
    PART = LINE * LINES,
    SECRET = 192,
    LAST = SECRET - LINE,    /* where the secret's last stripe begins */
    AHEAD = 8192,            /* bytes fetched into the second-level cache before their turn: the processor's own
                                prefetching stops at each page, and the first level has too few lines to wait in */
    PIECE = 4 << 20,         /* bytes asked for at once, of which as many come as are there. Each call sends word to the
                                source, which costs more than what later calls would find in a nearer cache */
    SHORT = 240,
    DIGEST = 16,
};

static const uint32_t P32_1 = 0x9E3779B1U, P32_2 = 0x85EBCA77U, P32_3 = 0xC2B2AE3DU;
static const uint64_t P64_1 = 0x9E3779B185EBCA87ULL, P64_2 = 0xC2B2AE3D27D4EB4FULL, P64_3 = 0x165667B19E3779F9ULL,
                      P64_4 = 0x85EBCA77C2B2AE63ULL, P64_5 = 0x27D4EB2F165667C5ULL, MIX = 0x165667919E3779F9ULL;

static const unsigned char secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static uint64_t word(const unsigned char *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t folded(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t merged(const uint64_t sums[8], const unsigned char *key, uint64_t start)
{
    uint64_t value = start;
    for (int i = 0; i < 4; i++)
        value += folded(sums[2 * i] ^ word(key + 16 * i), sums[2 * i + 1] ^ word(key + 16 * i + 8));
    value ^= value >> 37;
    value *= MIX;
    return value ^ (value >> 32);
}

static void put(unsigned char *at, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        at[i] = (unsigned char)(value >> (56 - 8 * i));
}

/* A block on its way: its sums, and how far it was hashed. */
typedef struct {
    uint64_t sums[8];
    size_t at;
} State;

static State begun(void)
{
    const State first = {{P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1}, 0};
    return first;
}

static void end(const uint64_t sums[8], uint64_t length, unsigned char *digest)
{
    put(digest, merged(sums, secret + LAST - 11, ~(length * P64_2)));
    put(digest + 8, merged(sums, secret + 11, length * P64_1));
}

static void fetch(const unsigned char *at)
{
    for (int i = 0; i < LINES; i++)
        _mm_prefetch((const char *)at + LINE * i, _MM_HINT_T1);
}

/* How what is hashed is stored: not at all, through the caches, or past them, which needs `to` on the edge of a line. */
enum Stores { NOWHERE, THROUGH, PAST };

/* The same two functions for registers of 64 and of 32 bytes, made once for each way to store. */
#define INLINE static inline __attribute__((always_inline))

INLINE __attribute__((target("avx512f"))) __m512i stripe_512(
    __m512i sums, const unsigned char *from, unsigned char *to, enum Stores stores, const unsigned char *key)
{
    __m512i bytes = _mm512_loadu_si512(from);
    if (stores == PAST)
        _mm512_stream_si512((void *)to, bytes);
    else if (stores == THROUGH)
        _mm512_storeu_si512(to, bytes);
    __m512i mixed = _mm512_xor_si512(bytes, _mm512_loadu_si512(key));
    __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
    return _mm512_add_epi64(product, _mm512_add_epi64(sums, _mm512_shuffle_epi32(bytes, _MM_PERM_BADC)));
}

INLINE __attribute__((target("avx512f"))) void run_512(
    State *state, unsigned char *to, const unsigned char *from, size_t limit, size_t length, unsigned char *digest,
    enum Stores stores)
{
    __m512i sums = _mm512_loadu_si512(state->sums), prime = _mm512_set1_epi32((int)P32_1);
    size_t at = state->at, last = length - LINE;
    for (; at + PART < length && at + PART <= limit; at += PART) {
        if (stores != NOWHERE)
            fetch(from + at + AHEAD);
        for (int i = 0; i < LINES; i++)
            sums = stripe_512(sums, from + at + LINE * i, to + at + LINE * i, stores, secret + 8 * i);
        sums = _mm512_xor_si512(sums, _mm512_srli_epi64(sums, 47));
        sums = _mm512_xor_si512(sums, _mm512_loadu_si512(secret + LAST));
        sums = _mm512_add_epi64(
            _mm512_mul_epu32(sums, prime),
            _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(sums, 32), prime), 32));
    }
    if (limit == length) {
        for (const unsigned char *key = secret; at + LINE < length; at += LINE, key += 8)
            sums = stripe_512(sums, from + at, to + at, stores, key);
        sums = stripe_512(sums, from + last, to + last, stores == NOWHERE ? NOWHERE : THROUGH, secret + LAST - 7);
    }
    _mm512_storeu_si512(state->sums, sums);
    state->at = at;
    if (limit == length)
        end(state->sums, length, digest);
}

INLINE __attribute__((target("avx2"))) __m256i half_256(
    __m256i sums, const unsigned char *from, unsigned char *to, enum Stores stores, const unsigned char *key)
{
    __m256i bytes = _mm256_loadu_si256((const void *)from);
    if (stores == PAST)
        _mm256_stream_si256((void *)to, bytes);
    else if (stores == THROUGH)
        _mm256_storeu_si256((void *)to, bytes);
    __m256i mixed = _mm256_xor_si256(bytes, _mm256_loadu_si256((const void *)key));
    __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    return _mm256_add_epi64(product, _mm256_add_epi64(sums, _mm256_shuffle_epi32(bytes, _MM_SHUFFLE(1, 0, 3, 2))));
}

INLINE __attribute__((target("avx2"))) __m256i scrambled_256(__m256i sums, const unsigned char *key)
{
    __m256i prime = _mm256_set1_epi32((int)P32_1);
    sums = _mm256_xor_si256(sums, _mm256_srli_epi64(sums, 47));
    sums = _mm256_xor_si256(sums, _mm256_loadu_si256((const void *)key));
    return _mm256_add_epi64(
        _mm256_mul_epu32(sums, prime),
        _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(sums, 32), prime), 32));
}

INLINE __attribute__((target("avx2"))) void run_256(
    State *state, unsigned char *to, const unsigned char *from, size_t limit, size_t length, unsigned char *digest,
    enum Stores stores)
{
    uint64_t *held = state->sums;
    __m256i low = _mm256_loadu_si256((const void *)held), high = _mm256_loadu_si256((const void *)(held + 4));
    size_t at = state->at, last = length - LINE;
    for (; at + PART < length && at + PART <= limit; at += PART) {
        if (stores != NOWHERE)
            fetch(from + at + AHEAD);
        for (size_t line = at, i = 0; i < LINES; i++, line += LINE) {
            low = half_256(low, from + line, to + line, stores, secret + 8 * i);
            high = half_256(high, from + line + 32, to + line + 32, stores, secret + 8 * i + 32);
        }
        low = scrambled_256(low, secret + LAST);
        high = scrambled_256(high, secret + LAST + 32);
    }
    if (limit == length) {
        for (const unsigned char *key = secret; at + LINE < length; at += LINE, key += 8) {
            low = half_256(low, from + at, to + at, stores, key);
            high = half_256(high, from + at + 32, to + at + 32, stores, key + 32);
        }
        enum Stores ends = stores == NOWHERE ? NOWHERE : THROUGH;
        low = half_256(low, from + last, to + last, ends, secret + LAST - 7);
        high = half_256(high, from + last + 32, to + last + 32, ends, secret + LAST - 7 + 32);
    }
    _mm256_storeu_si256((void *)held, low);
    _mm256_storeu_si256((void *)(held + 4), high);
    state->at = at;
    if (limit == length)
        end(held, length, digest);
}

/* Hashes a block of `length` bytes, of which `limit` are there, from where `state` stands on, and copies it to `to` unless
 * that is NULL. The digest is written when all are there. */
typedef void (*Block)(State *, unsigned char *to, const unsigned char *from, size_t limit, size_t length, unsigned char *);

#define BLOCK(bits, feature)                                                                                            \
    __attribute__((target(feature))) static void block_##bits(                                                         \
        State *state, unsigned char *to, const unsigned char *from, size_t limit, size_t length, unsigned char *digest)  \
    {                                                                                                                   \
        if (to == NULL)                                                                                                 \
            run_##bits(state, (unsigned char *)from, from, limit, length, digest, NOWHERE);                             \
        else if ((uintptr_t)to % LINE == 0)                                                                             \
            run_##bits(state, to, from, limit, length, digest, PAST);                                                   \
        else                                                                                                            \
            run_##bits(state, to, from, limit, length, digest, THROUGH);                                                \
    }

BLOCK(512, "avx512f")
BLOCK(256, "avx2")

static Block block_for(int bits)
{
    if (bits == 512 && __builtin_cpu_supports("avx512f"))
        return block_512;
    if (bits == 256 && __builtin_cpu_supports("avx2"))
        return block_256;
    return NULL;
}

/* The blocks of `count` parts within `length` bytes; -1 where a part is none, and, unless `receiving`, for a block that is
 * too short to be hashed here. What is received has to ascend. */
static Py_ssize_t blocks_within(const uint64_t *edges, Py_ssize_t count, uint64_t size, uint64_t length, int receiving)
{
    Py_ssize_t blocks = 0;
    uint64_t before = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint64_t start = edges[2 * i], stop = edges[2 * i + 1];
        if (start >= stop || stop > length || (receiving && start < before))
            return -1;
        if (!receiving && (stop - start) % size != 0 && (stop - start) % size <= SHORT)
            return -1;
        before = stop;
        blocks += (Py_ssize_t)((stop - start + size - 1) / size);
    }
    return blocks;
}

/* Receives something, up to `to`; 0, or an errno, or -1 where the other end closed. `done` says how far it came. */
static int received(int fd, unsigned char *into, uint64_t *done, uint64_t to, int wait_ms)
{
    for (;;) {
        ssize_t got = recv(fd, into + *done, to - *done < PIECE ? to - *done : PIECE, 0);
        if (got > 0) {
            *done += (uint64_t)got;
            return 0;
        }
        if (got == 0)
            return -1;
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK)
            return errno;
        struct pollfd waits = {fd, POLLIN, 0};
        int ready = poll(&waits, 1, wait_ms);
        if (ready == 0)
            return ETIMEDOUT;
        if (ready < 0 && errno != EINTR)
            return errno;
    }
}

static PyObject *receive(PyObject *module, PyObject *arguments)
{
    Py_buffer into, parts;
    unsigned long long size;
    int fd, bits, wait_ms, failed = 0;
    if (!PyArg_ParseTuple(arguments, "iw*y*Kii", &fd, &into, &parts, &size, &bits, &wait_ms))
        return NULL;
    PyObject *digests = NULL;
    Block block = block_for(bits);
    const uint64_t *edges = parts.buf;
    Py_ssize_t count = parts.len / (Py_ssize_t)(2 * sizeof(uint64_t)), blocks = -1;
    if (block && size > SHORT && parts.len % (Py_ssize_t)(2 * sizeof(uint64_t)) == 0)
        blocks = blocks_within(edges, count, size, (uint64_t)into.len, 1);
    if (blocks < 0)
        PyErr_SetString(PyExc_ValueError, "expected parts within a buffer, one after the other, and a width that this "
                                          "processor has");
    else if ((digests = PyBytes_FromStringAndSize(NULL, blocks * DIGEST)) != NULL) {
        unsigned char *digest = (unsigned char *)PyBytes_AsString(digests), *body = into.buf;
        uint64_t done = 0;
        memset(digest, 0, (size_t)blocks * DIGEST);
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < count && !failed; i++)
            for (uint64_t at = edges[2 * i], stop = edges[2 * i + 1]; at < stop && !failed; at += size, digest += DIGEST) {
                uint64_t length = stop - at < size ? stop - at : size;
                State state = begun();
                for (uint64_t limit = 0; limit < length && !failed;) {
                    if (done <= at + limit)
                        failed = received(fd, body, &done, (uint64_t)into.len, wait_ms);
                    limit = done < at + length ? (done > at ? done - at : 0) : length;
                    if (!failed && length > SHORT)
                        block(&state, NULL, body + at, limit, length, digest);
                }
            }
        while (!failed && done < (uint64_t)into.len)
            failed = received(fd, body, &done, (uint64_t)into.len, wait_ms);
        Py_END_ALLOW_THREADS
        if (failed) {
            Py_DECREF(digests);
            digests = NULL;
            if (failed < 0)
                PyErr_SetString(PyExc_EOFError, "the other end closed the connection");
            else {
                errno = failed;
                PyErr_SetFromErrno(PyExc_OSError);
            }
        }
    }
    PyBuffer_Release(&into);
    PyBuffer_Release(&parts);
    return digests;
}

static PyObject *copy(PyObject *module, PyObject *arguments)
{
    Py_buffer to, from, parts;
    unsigned long long size;
    int bits;
    if (!PyArg_ParseTuple(arguments, "w*y*y*Ki", &to, &from, &parts, &size, &bits))
        return NULL;
    PyObject *digests = NULL;
    Block block = block_for(bits);
    Py_ssize_t count = parts.len / (Py_ssize_t)(2 * sizeof(uint64_t)), blocks = -1;
    const uint64_t *edges = parts.buf;
    if (block && size > SHORT && to.len == from.len && parts.len % (Py_ssize_t)(2 * sizeof(uint64_t)) == 0)
        blocks = blocks_within(edges, count, size, (uint64_t)to.len, 0);
    if (blocks < 0)
        PyErr_SetString(PyExc_ValueError, "expected two buffers of one length, parts within them that make blocks above "
                                          "240 bytes, and a width that this processor has");
    else if ((digests = PyBytes_FromStringAndSize(NULL, blocks * DIGEST)) != NULL) {
        unsigned char *digest = (unsigned char *)PyBytes_AsString(digests);
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < count; i++)
            for (uint64_t at = edges[2 * i], stop = edges[2 * i + 1]; at < stop; at += size, digest += DIGEST) {
                uint64_t length = stop - at < size ? stop - at : size;
                State state = begun();
                block(&state, (unsigned char *)to.buf + at, (const unsigned char *)from.buf + at, length, length, digest);
            }
        /* Stores past the caches are in no order: what follows has to find them all. */
        _mm_sfence();
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&to);
    PyBuffer_Release(&from);
    PyBuffer_Release(&parts);
    return digests;
}

static int widest(void)
{
    return block_for(512) ? 512 : block_for(256) ? 256 : 0;
}

#else /* another processor: the caller copies, then hashes */

static PyObject *copy(PyObject *module, PyObject *arguments)
{
    PyErr_SetString(PyExc_ValueError, "not written for this processor");
    return NULL;
}

static PyObject *receive(PyObject *module, PyObject *arguments)
{
    return copy(module, arguments);
}

static int widest(void)
{
    return 0;
}

#endif

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS,
     "copy(to, from, parts, size, bits) -> 16 bytes for each block.\n\n"
     "Copies from[start:stop] to to[start:stop] for each pair (start, stop) of unsigned 64-bit numbers in parts, in\n"
     "blocks of size bytes, and returns the XXH3-128 of each block, made with registers of so many bits. Raises\n"
     "ValueError, and has copied nothing then."},
    {"receive", receive, METH_VARARGS,
     "receive(fd, into, parts, size, bits, wait_ms) -> 16 bytes for each block, zeros for those of at most 240 bytes.\n\n"
     "Fills into from a socket, and hashes the blocks of each pair (start, stop) in parts, which ascend. Raises ValueError,\n"
     "and has received nothing then; OSError, TimeoutError when nothing came for wait_ms (below 0: for ever), and EOFError."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_onepass", "Copies and digests in one pass.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__onepass(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "WIDEST", widest()) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
