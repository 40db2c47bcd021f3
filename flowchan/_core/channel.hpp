// The Python objects: Channel over either medium, and its ports In and Out.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <vector>

#include "blocking.hpp"
#include "codec.hpp"

namespace flowchan {

struct Channel {
    std::unique_ptr<LocalQueue> queue;  // one of the two
    std::shared_ptr<Ring> ring;
    std::vector<std::weak_ptr<Block>> loans;  // memory of the ring that writers here fill, or have put
    std::string name;
    uint64_t capacity = 0;
    uint64_t max_bytes = 0;  // UINT64_MAX: no limit (threads)
    uint64_t forks = fork_count;
    uint32_t plain = 0;      // ring: this process's own session, opened when first needed

    Channel(uint64_t capacity, bool processes, uint64_t max_bytes, std::string name);
    Channel(int fd, std::string name);
    ~Channel();

    std::string describe() const;     // "channel 'name'" or "Channel(64, across='threads')"
    uint32_t plain_session();         // throws nb::python_error
    bool usable();                    // false with a Python error set: a `threads` channel in a forked child
};

struct Out;

struct In {
    nb::object channel;
    Channel* ch;
    ReaderState state;
    std::vector<LocalQueue::Item> hand;  // threads: the items in hand, to be given back if they are not finished
    std::vector<Out*> feeds;  // the writers whose outputs belong to the item in hand
    uint64_t forks = fork_count;
    uint64_t generation = 0;
    bool open = true;
    uint64_t max_deaths = 0;  // an item with which so many workers have died goes to `on_poison` instead; 0: none does
    nb::object on_poison;

    In(nb::object channel, int session);
    ~In();
    void close(bool finished);
};

struct Out {
    nb::object channel;
    Channel* ch;
    WriterState state;
    nb::object reader;        // the In that numbers the items, or null
    uint64_t forks = fork_count;
    uint64_t generation = 0;
    bool open = true;
    bool replays = false;     // a source's: all it puts belongs to one item, number 0, so that a successor can skip it

    Out(nb::object channel, int session);
    ~Out();
    In* follows() const { return reader.is_valid() ? nb::inst_ptr<In>(reader) : nullptr; }
    void close();
};

// Each gives a new reference, or null with a Python error set. `in`/`out` is the port used, or null for a plain call.
PyObject* put_item(Channel& ch, Out* out, PyObject* item, Deadline deadline);
PyObject* get_item(Channel& ch, In* in, Deadline deadline, bool keep, bool iterating);
nb::object loan(Channel& ch, Out* out, uint64_t size, nb::handle timeout);
PyObject* put_all(Channel& ch, Out* out, PyObject* items, Deadline deadline);
PyObject* get_all(Channel& ch, In* in, Py_ssize_t most, Deadline deadline);

// The items in hand are done with: the writers that follow pass their turn. False with a Python error set.
bool tell_followers(In& in);

// One try, no waiting: Done, NotNow, Drained, or a step with its Python error set.
Step try_put(Channel& ch, Out* out, PyObject* item);
Step try_get(Channel& ch, In* in, PyObject*& item);

bool parse_deadline(PyObject* timeout, Deadline& deadline);

// Whether the port can be used here; false with a Python error set. A port used by a forked child for the first time
// moves to that child.
template <class Port> bool ready(Port& port);

nb::object select_one(nb::list gets, nb::list puts, nb::handle timeout);
nb::list wait_any(nb::list targets, double seconds);
void pass_on(nb::handle target, bool reading);

void abort_channel(Channel& ch, PyObject* cause);
nb::tuple channel_stats(Channel& ch);

extern PyMethodDef channel_methods[], in_methods[], out_methods[];
int channel_traverse(PyObject* self, visitproc visit, void* arg);
int channel_clear(PyObject* self);
int in_traverse(PyObject* self, visitproc visit, void* arg);
int out_traverse(PyObject* self, visitproc visit, void* arg);
int in_clear(PyObject* self);
int out_clear(PyObject* self);
PyObject* channel_next(PyObject* self);
PyObject* in_next(PyObject* self);

}  // namespace flowchan
