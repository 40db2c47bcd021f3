/* Waiting: no user sleeps while an item is available to it (C8). This models the wait queues of waiting.hpp and the
   loop of blocking.hpp.

   Two writers and READERS readers share a ring of CAP slots. Each critical section is one atomic step, because
   ring.pml shows that the changes of a dead lock owner happen completely or not at all. What remains are the counts
   of the wait queues, the system calls after the lock is released, and the kernel's step from "compare" to "sleep".

   Slices. A sleep is divided into slices of 100 ms, which would hide every lost wake-up from a search for deadlocks.
   So in the model, no slice ends before the first death. After a death, a slice ends only if nothing else can move
   (`timeout`), and only SLICES times per participant and death. So endless sleeping and checking is also an error. A
   futex may return without a reason at any time, but at most SPURIOUS times. FUTEX_WAKE wakes the sleeper that has
   slept longest.

   step of the model                        source
   --------------------------------------   ---------------------------------------------------------------
   call(), call_in_turn()                   waiting.hpp: WaitQueue::call, WaitQueue::call_all, WaitQueue::wake_by_rank
   call_writers()                           ring.hpp: Ring::wake_writers
   enter(), leave()                         waiting.hpp: WaitQueue::enter, WaitQueue::leave; blocking.hpp: Traits<Ring>::enter, leave
   fresh[p]                                 waiting.hpp: WaitQueue::seq == the `seq` that p remembers
   asleep[p], get_up(), futex_wake()        waiting.hpp: futex_wait, futex_wait_as, futex_wake, futex_wake_first;
                                            ring.hpp: Ring::wake
   operation() of a writer                  ring_items.cpp: Ring::room, Ring::try_put, Ring::finish_put
   operation() of a reader                  gets.cpp: get_step; ring_leases.cpp: Ring::acknowledge, Ring::free_leased;
                                            ring_items.cpp: Ring::try_take, Ring::at_end_for, Ring::wake_at_end
   first try                                blocking.hpp: perform
   registering, the loop                    blocking.hpp: wait
   depart()                                 ring_sessions.cpp: Ring::end_session, Ring::drop_copies; ring.cpp: Ring::close_with
   sweep()                                  ring_sessions.cpp: Ring::sweep; ring_leases.cpp: Ring::give_back
   take_lock()                              ring.cpp: Ring::lock, Ring::recover

   -D CORES=n: call_in_turn() keeps n readers running at a time. nobody_beside() then states C8: if there is an item
   and a reader waits, another reader is running.
   -D LAZY=n: readers wake writers only when n slots are free (ring.hpp: Ring::wake_writers, ReaderState::lazy).
   -D RANKS: FUTEX_WAKE may wake any reader, because the workers of a stage have ranks.
   -D GATHER: readers gather two items with `get_more`, which keeps earlier items on lease (operator_loops.py: batch).
   Left out: spinning, deadlines, ordered outputs (`turn`), large items, lack of memory.

   The source once had two errors. For each of them, a define makes the model wrong in the same way, and the search
   then finds the error:
     SOURCE_QUEUE_CLOSED blocking.hpp, perform() and wait(): a reader queues behind a starving reader while the first
                         one still has an item on lease, for which the starving reader may be waiting. In the model, no
                         reader queues once the channel is closed.
     SOURCE_END_OWN      ring_items.cpp, at_end_for(): for a reader with leased items, the end comes only if no other
                         reader has any, so two readers that gather wait for each other (with GATHER). In the model,
                         the end comes once nothing is inside. The reader sees items that others have given back when it
                         next asks without leased items.
   Planted faults: PLANT_no_wake (a put wakes no reader), PLANT_old_seq (the wake-up does not change seq, so a user
   that is about to sleep still falls asleep), PLANT_no_tell_end (the last acknowledgement wakes no user),
   PLANT_close_wakes_one (closing wakes only one user), PLANT_wake_one (while a user starves, only one user is woken,
   perhaps one that cannot continue), PLANT_no_pass_on (an interrupted user keeps the wake-up), PLANT_no_next (a
   reader that takes an item and leaves another one wakes no other reader), PLANT_no_slices (a sleep never ends
   without a wake-up), PLANT_end_leased (the end comes although an item is on lease). */

#ifndef READERS
#define READERS 2
#endif
#ifndef ITEMS
#define ITEMS 2       /* per writer */
#endif
#ifndef CAP
#define CAP 1
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#ifndef SPURIOUS
#define SPURIOUS 1    /* how often a futex returns without a reason */
#endif
#ifndef QUITS
#define QUITS 1         /* how many waiting calls a signal ends */
#endif
#ifndef CORES
#define CORES 1
#endif
#ifndef SLICES
#define SLICES 3
#endif
#ifdef GATHER
#define GATHERS true
#else
#define GATHERS false
#endif
#define WRITERS 2
#define ALL (READERS + WRITERS)
#define R 0
#define W 1
#ifdef SOURCE_QUEUE_CLOSED
#define may_pass(p) (starving[side_of(p)] == 0 || starving[side_of(p)] == p + 1)
#else
#define may_pass(p) (closed || starving[side_of(p)] == 0 || starving[side_of(p)] == p + 1)
#endif
#define side_of(p) (p < READERS -> R : W)

mtype = { DONE, WAIT, CLOSED, DRAINED, INTERRUPTED };

byte inside, leased, writers = WRITERS, readers = READERS, put, acknowledged;
bool closed, drained, owner_died;
hidden byte n, m, q, z;                 /* values that are used only within one step */
byte waiting[2], woken[2];
byte starving[2];                    /* number of the participant + 1; 0: none */
bool fresh[ALL], asleep[ALL], at_gate[ALL], dead[ALL], here[ALL];
byte in_hand[ALL];
chan line[2] = [ALL] of { byte };      /* the kernel's sleepers in each wait queue */
byte spurious = SPURIOUS, quits = QUITS, deaths, slices[ALL];

#if defined(PLANT_end_leased)
#define AT_END(p) true
#elif defined(SOURCE_END_OWN)
#define AT_END(p) (leased == in_hand[p])
#else
#define AT_END(p) (leased == in_hand[p] || in_hand[p] > 0)
#endif

inline call(side, k, count) {        /* adds the number of users to wake to `count` */
  n = (waiting[side] > woken[side] -> waiting[side] - woken[side] : 0);
  m = n;                             /* "all" means all users that sleep at this moment */
#ifndef PLANT_wake_one
  n = (n > k && !(k > 0 && starving[side] > 0) -> k : n);
#else
  n = (n > k -> k : n);
#endif
  woken[side] = woken[side] + n;
  if
  :: n > 0 ->
#ifndef PLANT_old_seq
     q = 0;
     do
     :: q < ALL -> fresh[q] = (side_of(q) == side -> false : fresh[q]); q++
     :: else -> break
     od
#endif
  :: else
  fi;
  count = (n > 0 && n == m || count == ALL -> ALL : count + n)
}

inline call_in_turn(k, count) {
  q = (woken[R] < CORES -> CORES - woken[R] : 0);
  q = (starving[R] > 0 || q > k -> k : q);
  call(R, q, count)
}
#define comes(p) (at_gate[p] && !fresh[p])
#define nobody_beside() assert(inside == 0 || waiting[R] == 0 || woken[R] > 0 || comes(0) || comes(1))

inline call_writers() {
#ifdef LAZY
  if
  :: CAP - inside >= LAZY -> call(W, CAP - inside, wake_w)
  :: else
  fi
#else
  call(W, 1, wake_w)
#endif
}

inline enter(side, p) { waiting[side]++; at_gate[p] = true; fresh[p] = true }
inline leave(side, p) {
  waiting[side]--; at_gate[p] = false; fresh[p] = false;
  woken[side] = (woken[side] > 0 -> woken[side] - 1 : 0)
}

inline tell_end() {
  if
  :: closed && inside == 0 -> call(R, ALL, wake_r)
  :: else
  fi
}

inline acknowledge(p) {              /* a reader does this first */
  if
  :: p < READERS && !keep && in_hand[p] > 0 ->
     assert(!drained);
     leased = leased - in_hand[p]; acknowledged = acknowledged + in_hand[p]; in_hand[p] = 0;
#ifndef PLANT_no_tell_end
     tell_end()
#endif
  :: else
  fi
}

/* An attempt of a waiting participant, under the lock. `step` is its result. Locals: step, wake_r, wake_w. */
inline operation(p) {
  if
  :: p < READERS ->
     acknowledge(p);
     if
     :: inside > 0 ->
        assert(!drained);
        inside--; leased++; in_hand[p]++; step = DONE;
#ifndef PLANT_no_next
        if :: inside > 0 -> call_in_turn(1, wake_r) :: else fi;
#endif
        call_writers(); tell_end()
     :: inside == 0 && closed && AT_END(p) -> step = DRAINED; drained = drained || in_hand[p] == 0
     :: else -> step = WAIT
     fi
  :: else ->
     if
     :: closed -> step = CLOSED
     :: !closed && inside < CAP ->
        inside++; put++; step = DONE;
#ifndef PLANT_no_wake
        call_in_turn(1, wake_r)
#endif
     :: else -> step = WAIT
     fi
  fi
}
inline close_(count_r, count_w) {
  closed = true;
#ifdef PLANT_close_wakes_one
  call(R, 1, count_r)
#else
  call(R, ALL, count_r)
#endif
  ; call(W, ALL, count_w)
}

/* The session of p ends, because p closes it, or because p has died and the session is swept. */
inline depart(p) {
  here[p] = false;
  if
  :: in_hand[p] > 0 ->
     assert(!drained);
     leased = leased - in_hand[p];
     if
     ::  dead[p] || step == INTERRUPTED -> inside = inside + in_hand[p]; call(R, in_hand[p], wake_r)
     :: else -> acknowledged = acknowledged + in_hand[p]; tell_end()
     fi;
     in_hand[p] = 0
  :: else
  fi;
  if
  :: at_gate[p] ->
     at_gate[p] = false; fresh[p] = false;
     waiting[side_of(p)]--;
     woken[side_of(p)] = (woken[side_of(p)] > waiting[side_of(p)] -> waiting[side_of(p)] : woken[side_of(p)])
  :: else
  fi;
  if
  :: dead[p] -> woken[R] = 0; woken[W] = 0; call(R, ALL, wake_r); call(W, ALL, wake_w)
  :: else
  fi;
  if
  :: p < READERS -> readers--; if :: readers == 0 && !closed -> close_(wake_r, wake_w) :: else fi
  :: else -> writers--; if :: writers == 0 && !closed -> close_(wake_r, wake_w) :: else fi
  fi
}

inline sweep() {
  z = 0;
  do
  :: z < ALL ->
     if :: dead[z] && here[z] -> depart(z) :: else fi;
     z++
  :: else -> break
  od;
  if :: starving[R] > 0 && dead[starving[R] - 1] -> starving[R] = 0 :: else fi;
  if :: starving[W] > 0 && dead[starving[W] - 1] -> starving[W] = 0 :: else fi;
  z = 0
}

/* A process that gets a dead owner's lock wakes all users, because it does not know whom the owner meant to wake. */
inline take_lock() {
  if
  :: owner_died -> owner_died = false; call(R, ALL, wake_r); call(W, ALL, wake_w)
  :: else
  fi
}

/* Wake the longest sleeper first, as the kernel does for threads of equal priority. */
inline futex_wake(side, count) {
  do
  :: count > 0 && len(line[side]) > 0 -> line[side]?q; asleep[q] = false; count--
  :: else -> count = 0; break
  od
}
inline get_up(p) { asleep[p] = false; line[side_of(p)]??eval(p) }

#if DEATHS
#define MAY_DIE(p) if :: atomic { deaths < DEATHS -> deaths++; goto died } :: true fi
#else
#define MAY_DIE(p) skip
#endif
inline choose_crash(p) {             /* decides whether p dies in its next critical section */
  if
#if DEATHS
  :: deaths < DEATHS -> deaths++; crash = true
#endif
  :: true
  fi
}
/* p dies while it holds the lock. Its change has happened and its wake-ups are counted, but are never sent. */
inline crash_here(p) {
  if
  :: crash -> owner_died = true; dead[p] = true; wake_r = 0; wake_w = 0
  :: else
  fi
}
inline wake(p) {                     /* after the lock is released: two system calls */
#if DEATHS
  if :: crash -> goto died :: else fi;
  MAY_DIE(p);
#endif
  do
  :: atomic {
       wake_r > 0 ->
#ifdef RANKS
       if :: true :: d_step { len(line[R]) > 1 -> line[R]?q; line[R]!q } fi;
#endif
       d_step { futex_wake(R, wake_r); wake_r = 0 }
     };
     MAY_DIE(p)
  :: d_step { wake_r == 0 && wake_w > 0 -> futex_wake(W, wake_w); wake_w = 0 };
     MAY_DIE(p)
  :: atomic { wake_r == 0 && wake_w == 0 -> break }
  od
}

proctype participant(byte me) {
  byte wake_r, wake_w, left = ITEMS, vain;
  mtype step = DONE;
  bool keep, slice, error, crash, signal;
  do
  :: atomic { me >= READERS && left == 0 -> break }
  :: me < READERS || left > 0 ->
     atomic {
       choose_crash(me);
       d_step {
         take_lock();
         if :: may_pass(me) -> operation(me) :: else -> step = WAIT fi;
         nobody_beside(); crash_here(me)
       }
     };
     wake(me);
     if
     :: step == WAIT ->
        atomic {
          choose_crash(me);
          d_step {
            take_lock();
            if
            :: may_pass(me) -> operation(me)
            :: else -> step = WAIT
            fi;
            if :: step == WAIT -> enter(side_of(me), me) :: else fi;
            nobody_beside(); crash_here(me)
          }
        };
        wake(me);
        do
        :: step == WAIT ->
           d_step {                  /* the kernel compares and falls asleep in one step */
             slice = false; error = !fresh[me]; asleep[me] = fresh[me];
             if :: asleep[me] -> line[side_of(me)]!me :: else fi
           };
           if
           :: !asleep[me]
           :: d_step { asleep[me] && spurious > 0 -> spurious--; get_up(me) }
#ifndef PLANT_no_slices
           :: atomic { timeout && asleep[me] && deaths > 0 && slices[me] < SLICES * deaths ->
                       slices[me]++; get_up(me); slice = true; error = true }
#endif
           :: d_step { asleep[me] && deaths < DEATHS -> deaths++; get_up(me); crash = true }
           fi;
           if :: crash -> goto died :: else fi;
           atomic {
             choose_crash(me);
             if :: quits > 0 -> quits--; signal = true :: true fi;
             d_step {
               take_lock(); leave(side_of(me), me);
               if :: slice -> sweep() :: else fi;
               if
               :: signal -> step = INTERRUPTED
               :: !signal && (may_pass(me) || slice) -> operation(me)
               :: else -> step = WAIT
               fi;
               if
               :: step == WAIT ->
                  vain = (!error && vain < 2 -> vain + 1 : vain);
                  starving[side_of(me)] =
                    (vain == 2 && !error && starving[side_of(me)] == 0 -> me + 1 : starving[side_of(me)]);
                  enter(side_of(me), me)
               :: else ->
                  vain = 0; signal = false;
                  if
                  :: starving[side_of(me)] == me + 1 ->
                     starving[side_of(me)] = 0;
                     if :: me < READERS -> call(R, ALL, wake_r) :: else -> call(W, ALL, wake_w) fi
#ifndef PLANT_no_pass_on
                  :: starving[side_of(me)] != me + 1 && step == INTERRUPTED ->
                     if :: me < READERS -> call(R, 1, wake_r) :: else -> call(W, 1, wake_w) fi
#endif
                  :: else
                  fi
               fi;
               error = false; slice = false; nobody_beside(); crash_here(me)
             }
           };
           wake(me)
        :: else -> break
        od
     :: else
     fi;
     if
     :: atomic { step == DONE -> left = (me >= READERS -> left - 1 : left); keep = GATHERS && in_hand[me] == 1 }
     :: atomic { step == DRAINED && keep -> keep = false }
     :: else -> break
     fi
  od;
  atomic { choose_crash(me); d_step { take_lock(); depart(me); crash_here(me) } };
  wake(me);
  goto over;
died:
  skip;
  dead[me] = true;
over:
  skip
}

init {
  byte p;
  atomic {
    do
    :: p < ALL -> here[p] = true; run participant(p); p++
    :: else -> break
    od
  };
  (_nr_pr == 1);                     /* if a process cannot end, the search reports an invalid end state */
  d_step {
    p = 0;
    do
    :: p < ALL -> if :: dead[p] && here[p] -> goto swept :: else fi; p++
    :: else -> break
    od;
    assert(leased == 0 && waiting[R] == 0 && waiting[W] == 0 && closed);
    assert(inside + acknowledged == put);
    assert(inside == 0 || deaths > 0 || quits < QUITS);
swept:
    skip
  }
}
