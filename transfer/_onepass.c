/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies blocks and digests them in the same pass: each byte is loaded once, its register is both hashed and stored.
 *
 * Why: a copy past the caches (non-temporal stores, as the C library does it for large ones) leaves nothing in them to
 * hash; a copy through them reads the target's lines only to overwrite them, and takes half as long again. Here the
 * load from memory is the limit, and the digest and the stores are done while it waits.
 *
 * The digest is XXH3-128 with the default secret and seed 0, for inputs above 240 bytes (the algorithm's specification:
 * github.com/Cyan4973/xxHash, doc/xxhash_spec.md). Shorter blocks are left to the caller.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

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

static void begin(uint64_t sums[8])
{
    const uint64_t first[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    memcpy(sums, first, sizeof first);
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

/* The same two functions for registers of 64 and of 32 bytes. `aligned`: whether `to` may be stored to past the caches. */

__attribute__((target("avx512f"))) static inline __m512i stripe_512(
    __m512i sums, const unsigned char *from, unsigned char *to, int aligned, const unsigned char *key)
{
    __m512i bytes = _mm512_loadu_si512(from);
    if (aligned)
        _mm512_stream_si512((void *)to, bytes);
    else
        _mm512_storeu_si512(to, bytes);
    __m512i mixed = _mm512_xor_si512(bytes, _mm512_loadu_si512(key));
    __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
    return _mm512_add_epi64(product, _mm512_add_epi64(sums, _mm512_shuffle_epi32(bytes, _MM_PERM_BADC)));
}

__attribute__((target("avx512f"))) static void block_512(
    unsigned char *to, const unsigned char *from, size_t length, unsigned char *digest)
{
    uint64_t held[8];
    begin(held);
    __m512i sums = _mm512_loadu_si512(held), prime = _mm512_set1_epi32((int)P32_1);
    int aligned = (uintptr_t)to % LINE == 0;
    size_t at = 0, last = length - LINE;
    for (; at + PART < length; at += PART) {
        fetch(from + at + AHEAD);
        for (int i = 0; i < LINES; i++)
            sums = stripe_512(sums, from + at + LINE * i, to + at + LINE * i, aligned, secret + 8 * i);
        sums = _mm512_xor_si512(sums, _mm512_srli_epi64(sums, 47));
        sums = _mm512_xor_si512(sums, _mm512_loadu_si512(secret + LAST));
        sums = _mm512_add_epi64(
            _mm512_mul_epu32(sums, prime),
            _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(sums, 32), prime), 32));
    }
    for (const unsigned char *key = secret; at + LINE < length; at += LINE, key += 8)
        sums = stripe_512(sums, from + at, to + at, aligned, key);
    sums = stripe_512(sums, from + last, to + last, 0, secret + LAST - 7);
    _mm512_storeu_si512(held, sums);
    end(held, length, digest);
}

__attribute__((target("avx2"))) static inline __m256i half_256(
    __m256i sums, const unsigned char *from, unsigned char *to, int aligned, const unsigned char *key)
{
    __m256i bytes = _mm256_loadu_si256((const void *)from);
    if (aligned)
        _mm256_stream_si256((void *)to, bytes);
    else
        _mm256_storeu_si256((void *)to, bytes);
    __m256i mixed = _mm256_xor_si256(bytes, _mm256_loadu_si256((const void *)key));
    __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    return _mm256_add_epi64(product, _mm256_add_epi64(sums, _mm256_shuffle_epi32(bytes, _MM_SHUFFLE(1, 0, 3, 2))));
}

__attribute__((target("avx2"))) static inline __m256i scrambled_256(__m256i sums, const unsigned char *key)
{
    __m256i prime = _mm256_set1_epi32((int)P32_1);
    sums = _mm256_xor_si256(sums, _mm256_srli_epi64(sums, 47));
    sums = _mm256_xor_si256(sums, _mm256_loadu_si256((const void *)key));
    return _mm256_add_epi64(
        _mm256_mul_epu32(sums, prime),
        _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(sums, 32), prime), 32));
}

__attribute__((target("avx2"))) static void block_256(
    unsigned char *to, const unsigned char *from, size_t length, unsigned char *digest)
{
    uint64_t held[8];
    begin(held);
    __m256i low = _mm256_loadu_si256((const void *)held), high = _mm256_loadu_si256((const void *)(held + 4));
    int aligned = (uintptr_t)to % LINE == 0;
    size_t at = 0, last = length - LINE;
    for (; at + PART < length; at += PART) {
        fetch(from + at + AHEAD);
        for (size_t line = at, i = 0; i < LINES; i++, line += LINE) {
            low = half_256(low, from + line, to + line, aligned, secret + 8 * i);
            high = half_256(high, from + line + 32, to + line + 32, aligned, secret + 8 * i + 32);
        }
        low = scrambled_256(low, secret + LAST);
        high = scrambled_256(high, secret + LAST + 32);
    }
    for (const unsigned char *key = secret; at + LINE < length; at += LINE, key += 8) {
        low = half_256(low, from + at, to + at, aligned, key);
        high = half_256(high, from + at + 32, to + at + 32, aligned, key + 32);
    }
    low = half_256(low, from + last, to + last, 0, secret + LAST - 7);
    high = half_256(high, from + last + 32, to + last + 32, 0, secret + LAST - 7 + 32);
    _mm256_storeu_si256((void *)held, low);
    _mm256_storeu_si256((void *)(held + 4), high);
    end(held, length, digest);
}

typedef void (*Block)(unsigned char *, const unsigned char *, size_t, unsigned char *);

static Block block_for(int bits)
{
    if (bits == 512 && __builtin_cpu_supports("avx512f"))
        return block_512;
    if (bits == 256 && __builtin_cpu_supports("avx2"))
        return block_256;
    return NULL;
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
    Py_ssize_t count = parts.len / (Py_ssize_t)(2 * sizeof(uint64_t)), blocks = 0;
    const uint64_t *edges = parts.buf;
    int sound = block && size > SHORT && to.len == from.len && parts.len % (Py_ssize_t)(2 * sizeof(uint64_t)) == 0;
    for (Py_ssize_t i = 0; sound && i < count; i++) {
        uint64_t start = edges[2 * i], stop = edges[2 * i + 1];
        sound = start < stop && stop <= (uint64_t)to.len && ((stop - start) % size == 0 || (stop - start) % size > SHORT);
        blocks += (Py_ssize_t)((stop - start + size - 1) / size);
    }
    if (!sound)
        PyErr_SetString(PyExc_ValueError, "expected two buffers of one length, parts within them that make blocks above "
                                          "240 bytes, and a width that this processor has");
    else if ((digests = PyBytes_FromStringAndSize(NULL, blocks * DIGEST)) != NULL) {
        unsigned char *digest = (unsigned char *)PyBytes_AsString(digests);
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < count; i++)
            for (uint64_t at = edges[2 * i], stop = edges[2 * i + 1]; at < stop; at += size, digest += DIGEST)
                block((unsigned char *)to.buf + at, (const unsigned char *)from.buf + at,
                      stop - at < size ? stop - at : size, digest);
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
