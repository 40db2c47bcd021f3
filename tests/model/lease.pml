/* Exactly once under kill -9 (C11). Two workers of a stage read ring I, and write OUTPUTS outputs per item to ring O.
   A worker may die between any two steps. The supervisor then gives its leased items back and starts a replacement.

   Each critical section is one step, which ring.pml justifies. A process that must wait stands still until it can
   continue, and gate.pml shows that it does continue. Two writers put ITEMS items each into I. If a writer dies, the
   rest of its items are not put. One sink reads O. In the source, all rings have the same code. So I and O differ
   here only in what is observed about them.

   step of the model                     source
   -----------------------------------   ------------------------------------------------------------------
   source                                operator_loops.py: source; ring_items.cpp: Ring::try_put; ring_sessions.cpp: Ring::end_session
   ask                                   gets.cpp: get_item, get_step; ring_leases.cpp: Ring::acknowledge; ring_items.cpp: Ring::try_take
   AT_END()                              ring_items.cpp: Ring::at_end_for
   begin()                               puts.cpp: begin; ring_turns.cpp: Ring::begin_item
   one output                            ring.hpp: skips; puts.cpp: put_frame; ring_items.cpp: Ring::try_put, Ring::link
   leaving: told, close In, close Out    worker.py: work; ports.cpp: In::close, Out::close; ring_sessions.cpp: Ring::end_session
   open_again, numbers, retire,          run_ports.py: RunPorts::recover; recovery.py: take_up; bindings.cpp: retire,
     give up                             take_up; ring_sessions.cpp: Ring::open_session, Ring::retire_writer;
                                         ring_leases.cpp: Ring::give_back
   release                               action_executor.py: carry_out (ReleasePorts), after events.py: Ended
   start                                 local_part.py: LocalPart::start_workers
   sink                                  operator_loops.py: sink (plain reads: C4)

   A session is an index that is reused (layout.hpp: Session). Items get their numbers when they are first taken, as
   in Ring::try_take. Left out: ordered outputs, several output rings, poison items, restart limits, get_many.

   Planted faults: PLANT_forget (the supervisor ends the dead writer's session without keeping its committed count),
   PLANT_hasty (it gives the item back before it retires the writer), PLANT_apart (the output and the committed count
   are two critical sections), PLANT_open_late (the replacement's ports are opened after the dead worker's ports are
   closed; needs -D WORKERS=1), PLANT_end_leased (the end comes although an item is on lease), PLANT_finish (items
   that a dead worker leased count as finished), PLANT_no_inherit (a worker that takes over an item does not adopt the
   count that was kept for it), PLANT_any_resume (a kept count is used for any item). */

#ifndef ITEMS
#define ITEMS 1       /* per writer */
#endif
#ifndef OUTPUTS
#define OUTPUTS 2     /* per item */
#endif
#ifndef DEATHS
#define DEATHS 2
#endif
#ifndef CAP
#define CAP 1
#endif
#ifndef WORKERS
#define WORKERS 2
#endif
#define TOTAL (2 * ITEMS)
#define SESSIONS (3 + DEATHS)        /* two workers, one replacement that is starting, one kept count per death */
#define NONE 255

mtype = { FREE, READER, WRITER, RESUME };

/* Ring I, with its front at index 0. */
byte queue[TOTAL + 1], inside, numbered, number[TOTAL];   /* number of each item + 1; 0: none yet */
bool closed_in;
byte writers_in = 2, readers_in, leased;
mtype role_in[SESSIONS] = FREE;
byte in_hand[SESSIONS] = NONE;
/* Ring O. The items in the ring are only counted. */
byte inside_out;
bool closed_out;
byte writers_out, resumes;
mtype role_out[SESSIONS] = FREE;
byte committed_item[SESSIONS], committed_count[SESSIONS];

/* What can be seen from outside. */
bool is_put[TOTAL];
byte output[TOTAL * OUTPUTS];        /* how often each output is in O */
bool drained_in, drained_out;
byte read;

/* Workers: their sessions and states. */
byte reading[2] = NONE, writing[2] = NONE;
bool go[2], dead[2], told[2], gone[2];
byte deaths;
hidden byte i, j;

#ifdef PLANT_end_leased
#define AT_END(s) (closed_in && inside == 0)
#else
#define AT_END(s) (closed_in && inside == 0 && leased == (in_hand[s] != NONE))
#endif

#define open_session(role, kind, result) \
  i = 0; \
  do \
  :: role[i] != FREE -> i++; assert(i < SESSIONS) \
  :: else -> break \
  od; \
  role[i] = kind; result = i; i = 0
inline open_ports(w) {
  open_session(role_in, READER, reading[w]); in_hand[reading[w]] = NONE; readers_in++;
  open_session(role_out, WRITER, writing[w]); writers_out++;
  committed_item[writing[w]] = 0; committed_count[writing[w]] = 0
}
inline leave_in(s) {                 /* end_session(s, finished) of a reader */
  if
  :: role_in[s] == READER ->
     if :: in_hand[s] != NONE -> leased--; in_hand[s] = NONE :: else fi;
     role_in[s] = FREE; readers_in--;
     closed_in = closed_in || readers_in == 0
  :: else
  fi
}
inline leave_out(s) {
  if
  :: role_out[s] == WRITER ->
     role_out[s] = FREE; committed_item[s] = 0; committed_count[s] = 0; writers_out--;
     closed_out = closed_out || writers_out == 0
  :: else
  fi
}
inline give_back(s) {                /* end_session(s, not finished) of a reader */
  if
  :: role_in[s] == READER ->
     if
     :: in_hand[s] != NONE ->
        assert(!drained_in);
#ifndef PLANT_finish
        i = inside;
        do
        :: i > 0 -> queue[i] = queue[i - 1]; i--
        :: else -> break
        od;
        queue[0] = in_hand[s]; inside++;
#endif
        leased--; in_hand[s] = NONE
     :: else
     fi;
     role_in[s] = FREE; readers_in--;
     closed_in = closed_in || readers_in == 0
  :: else
  fi
}

proctype source(byte me) {
  byte sent;
  do
  :: sent < ITEMS ->
     if
     :: d_step { !closed_in && inside < CAP ->
                 assert(!drained_in);
                 queue[inside] = me * ITEMS + sent; inside++;
                 is_put[me * ITEMS + sent] = true; sent++ }
     :: closed_in -> break
     :: atomic { deaths < DEATHS -> deaths++; break }   /* the writer dies; another process ends its session */
     fi
  :: else -> break
  od;
  skip;
  d_step { sent = 0; writers_in--; closed_in = closed_in || writers_in == 0 }
}

#define MAY_DIE if :: atomic { deaths < DEATHS -> deaths++; goto died } :: true fi

inline begin() {                     /* before an item's first output, in the critical section of that output */
  count = 0; skip_ = 0; keyed = true; i = 0;
  do
  :: resumes > 0 && i < SESSIONS ->
#ifdef PLANT_any_resume
     if :: role_out[i] == RESUME ->
#else
     if :: role_out[i] == RESUME && committed_item[i] == number[in_hand[reading[me]]] ->
#endif
           skip_ = committed_count[i];
#ifndef PLANT_no_inherit
           committed_item[writing[me]] = committed_item[i];
           committed_count[writing[me]] = committed_count[i];
#endif
           role_out[i] = FREE; committed_item[i] = 0; committed_count[i] = 0; resumes--;
           break
     :: else -> i++
     fi
  :: else -> break
  od;
  i = 0
}
#ifdef PLANT_apart
#define COMMITTED
#else
#define COMMITTED committed_item[writing[me]] = number[in_hand[reading[me]]]; committed_count[writing[me]] = count
#endif

proctype worker(byte me) {
  byte count, skip_;
  bool keyed, ended;
start:
  atomic { go[me] -> go[me] = false };
  do
  :: MAY_DIE;
     /* ask: the last item is finished, and the next one goes on lease */
     d_step {
       in_hand[reading[me]] != NONE || inside > 0 || AT_END(reading[me]) ->
       if
       :: in_hand[reading[me]] != NONE -> assert(!drained_in); in_hand[reading[me]] = NONE; leased--
       :: else
       fi;
       keyed = false; count = 0; skip_ = 0;
       if
       :: inside > 0 ->
          assert(!drained_in);
          in_hand[reading[me]] = queue[0]; leased++; inside--; i = 0;
          do
          :: i < inside -> queue[i] = queue[i + 1]; i++
          :: else -> break
          od;
          queue[inside] = 0; i = 0;
          if
          :: number[in_hand[reading[me]]] == 0 -> numbered++; number[in_hand[reading[me]]] = numbered
          :: else
          fi
       :: inside == 0 && AT_END(reading[me]) -> drained_in = true; ended = true
       :: else                       /* acknowledged; it waits on */
       fi
     };
     if
     :: ended -> break
     :: !ended && in_hand[reading[me]] != NONE ->
        do
        :: count < OUTPUTS ->
           MAY_DIE;
           d_step {                  /* one output: skipped, or put when there is room */
             (keyed && count < skip_) || !keyed || closed_out || inside_out < CAP ->
             if :: !keyed -> begin() :: else fi;
             if
             :: count < skip_ -> count++
             :: count >= skip_ && closed_out -> assert(false)   /* O is not closed while it has a writer */
             :: count >= skip_ && !closed_out && inside_out < CAP ->
                assert(!drained_out);
                inside_out++;
                output[in_hand[reading[me]] * OUTPUTS + count]++;
                assert(output[in_hand[reading[me]] * OUTPUTS + count] == 1);
                count++;
                COMMITTED
             :: else                 /* the item has begun, and its output waits for room */
             fi
           };
#ifdef PLANT_apart
           MAY_DIE;
           d_step { committed_item[writing[me]] = number[in_hand[reading[me]]]; committed_count[writing[me]] = count }
#endif
        :: count == OUTPUTS -> break
        od
     :: else
     fi
  od;
  MAY_DIE;
  told[me] = true;                   /* before the ports close, the supervisor learns that the worker ends */
  MAY_DIE;
  d_step { leave_in(reading[me]) };
  MAY_DIE;
  d_step { leave_out(writing[me]) };
  gone[me] = true;
  goto over;
died:
  atomic { count = 0; skip_ = 0; keyed = false; ended = false; dead[me] = true };
  if
  :: go[me] -> goto start            /* its replacement, in a process of its own */
  :: gone[me]
  fi;
over:
  skip
}

proctype supervisor() {
  byte old_in, old_out, item, w;
  do
  :: atomic { dead[0] && !gone[0] -> w = 0 };
handle:
     if
     :: !told[w] ->
        skip;
        d_step {                     /* open_again */
          dead[w] = false; old_in = reading[w]; old_out = writing[w];
#ifndef PLANT_open_late
          open_ports(w)
#endif
        };
        item = in_hand[old_in];      /* numbers */
#ifdef PLANT_hasty
        d_step { give_back(old_in) };
#endif
        d_step {                     /* retire */
          if
#ifndef PLANT_forget
          :: item != NONE && committed_item[old_out] > 0 && committed_item[old_out] == number[item] ->
             writers_out--; resumes++; role_out[old_out] = RESUME;
             closed_out = closed_out || writers_out == 0
#endif
          :: else -> leave_out(old_out)
          fi
        };
#ifndef PLANT_hasty
        d_step { give_back(old_in) };   /* give up */
#endif
#ifdef PLANT_open_late
        d_step { open_ports(w) };
#endif
        d_step { old_in = 0; old_out = 0; item = 0; go[w] = true; w = 0 }      /* start */
     :: told[w] ->                   /* release */
        skip;
        d_step { leave_in(reading[w]) };
        d_step { leave_out(writing[w]); gone[w] = true; w = 0 }
     fi
  :: atomic { dead[1] && !gone[1] -> w = 1 };
     goto handle
  :: atomic { gone[0] && gone[1] -> break }
  od
}

proctype sink() {
  do
  :: d_step { inside_out > 0 -> assert(!drained_out); inside_out--; read++ }
  :: d_step { inside_out == 0 && closed_out -> drained_out = true };
     break
  od
}

init {
  d_step {
    open_ports(0); go[0] = true;
#if WORKERS == 2
    open_ports(1); go[1] = true
#else
    gone[1] = true
#endif
  };
  atomic {
    run source(0); run source(1); run worker(0); run supervisor(); run sink();
#if WORKERS == 2
    run worker(1)
#endif
  };
  (_nr_pr == 1);
  d_step {
    j = 0; i = 0;
    do
    :: j < TOTAL * OUTPUTS ->
       assert(output[j] == is_put[j / OUTPUTS]);
       i = i + output[j]; j++
    :: else -> break
    od;
    assert(read == i && leased == 0 && inside == 0 && resumes == 0 && drained_in && drained_out)
  }
}
