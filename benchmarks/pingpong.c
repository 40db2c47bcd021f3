/* Prints the time in ns that a cache line takes from one core to another and back. Two processes, each on its own
 * core, take turns to increment one word. The result is the median of 100 runs of 1,000 round trips. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { TIMES = 100, TRIPS = 1000 };

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

static int use_core(const cpu_set_t* allowed, int which) {
    for (int core = 0; core < CPU_SETSIZE; ++core) {
        if (!CPU_ISSET(core, allowed) || which--) continue;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(core, &one);
        return sched_setaffinity(0, sizeof one, &one);
    }
    return -1;
}

static int ascending(const void* a, const void* b) {
    const double difference = *(const double*)a - *(const double*)b;
    return (difference > 0) - (difference < 0);
}

static void add_in_turn(atomic_int* word, int from, int to) {
    for (int i = from; i < to; i += 2) {
        while (atomic_load_explicit(word, memory_order_acquire) != i) {}
        atomic_store_explicit(word, i + 1, memory_order_release);
    }
}

int main(void) {
    cpu_set_t allowed;
    atomic_int* word = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (word == MAP_FAILED || sched_getaffinity(0, sizeof allowed, &allowed)) return 1;
    if (CPU_COUNT(&allowed) < 2) return 1;
    const pid_t other = fork();
    if (other == 0) {
        use_core(&allowed, 1);
        add_in_turn(word, 1, 2 * TIMES * TRIPS);
        _exit(0);
    }
    if (other < 0 || use_core(&allowed, 0)) return 1;
    static double took[TIMES];
    double before = now_ns();
    for (int n = 0; n < TIMES; ++n) {
        add_in_turn(word, 2 * n * TRIPS, 2 * (n + 1) * TRIPS);
        const double now = now_ns();
        took[n] = (now - before) / TRIPS;
        before = now;
    }
    waitpid(other, NULL, 0);
    qsort(took, TIMES, sizeof *took, ascending);
    printf("%.0f\n", took[TIMES / 2]);
    return 0;
}
