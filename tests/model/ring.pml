/* The critical sections of one ring, store by store, with a death before and after each store (C11). Every operation
   happens completely or not at all. This holds if a process dies during the operation, during the recovery from that
   death, and even during the recovery from a death in the recovery.

   Two writers put ITEMS items each. Two readers lease them, and acknowledge each item with their next call. A dead
   process is not replaced (lease.pml does that). A janitor ends the sessions of dead processes and gives their leased
   items back. It may also die.

   The shared memory is the array `mem`. Its words have the names of layout.hpp. The essential part is the record
   `redo`: a change is composed into the record, marked valid, applied store by store, and cleared. Composing takes no
   steps, because no process reads a record that is not valid. While a process holds the lock, no other process reads
   `mem`, so a whole critical section is one atomic block. A death may end the block at any point. The next process
   then finds that the owner of the lock is dead.

   step of the model                     source
   -----------------------------------   ------------------------------------------------------------------
   set()                                 redo.hpp: Change::set
   COMMIT(), finish(), apply()           redo.hpp: Change::commit, Redo::apply; each may_die() is a fault_point()
   lock(), unlock()                      ring.cpp: Ring::lock (robust mutex, EOWNERDEAD); ring.hpp: Ring::unlock
   lock(), its first branch              ring.cpp: Ring::recover; lock.hpp: pthread_mutex_consistent; redo.hpp: Redo::recover
   compose_put()                         ring_items.cpp: Ring::try_put, Ring::room, Ring::take_slot, Ring::link
   compose_take()                        ring_items.cpp: Ring::try_take, the branch of a reader
   compose_acknowledge()                 ring_leases.cpp: Ring::acknowledge, Ring::free_leased; ring_runs.cpp: Ring::free_run
   AT_END                                ring_items.cpp: Ring::at_end_for
   compose_give_back()                   ring_leases.cpp: Ring::give_back
   compose_leave(), end_session()        ring_sessions.cpp: Ring::end_session; ring.cpp: Ring::close_with
   janitor                               ring_sessions.cpp: Ring::sweep
   look()                                layout.hpp: "a slot is in exactly one of these places"
   room to begin an operation            blocking.hpp: wait; a sleeper of gate.pml stands still here until it can go on,
                                         or until there is a dead owner to recover from (its slice)

   Left out: memory (start_afresh, growth), large items (FILLING, HELD), parked outputs (turn, advance), break_, and
   several items in one change (ring_runs.cpp). For these, the fault walk kills a process at every store.

   Planted faults: PLANT_ignore (recovery ignores a valid record), PLANT_late (a record is applied before it is marked
   valid), PLANT_early (a record is cleared before it is applied), PLANT_relative (a value is "one more" instead of
   absolute), PLANT_inconsistent (recovery omits pthread_mutex_consistent), PLANT_not_robust (a dead owner keeps the
   lock), PLANT_end_leased (the end comes although an item is on lease), PLANT_two_changes (an item leaves the FIFO in
   one change and enters the lease list in another), PLANT_close_apart (ending the last session and closing the
   channel are two changes). */

#ifndef CAP
#define CAP 1
#endif
#ifndef ITEMS
#define ITEMS 2       /* per writer */
#endif
#ifndef DEATHS
#define DEATHS 2
#endif

#define SLOTS (CAP + 2)              /* two more items can be on lease */
#define TOTAL (2 * ITEMS)
#define NONE 0

/* Words. Slots are 1 to SLOTS, and sessions are 0 and 1 (writers), 2 and 3 (readers). */
#define HEAD 0
#define TAIL 1
#define PUTS 2
#define TAKES 3
#define STATE 4
#define LEASED 5
#define USED 6                       /* slots_used */
#define FREE 7                       /* free_slots[0] */
#define OPENED 8                     /* + 0: writers, + 1: readers */
#define ROLE(s) (10 + s)
#define LEASE_HEAD(s) (12 + s)       /* from 14 on */
#define LEASE_TAIL(s) (14 + s)       /* from 16 on */
#define IN_HAND(s) (16 + s)          /* from 18 on */
#define NEXT(slot) (19 + slot)       /* from 20 on */
#define PLACE(slot) (19 + SLOTS + slot)
#define WORDS (20 + 2 * SLOTS)
#define MOST 14

#define INSIDE 1
#define ON_LEASE 2

byte mem[WORDS];
byte payload[SLOTS + 1];             /* number of the item; written before the change and not part of it */
byte at[MOST], value[MOST], valid;   /* the redo record */
byte n;                              /* number of composed entries */

#define FREE_LOCK 0
#define HELD 1
#define DEAD 2                       /* the owner of the lock has died */
#define LOST 3                       /* unlocked without being made consistent: ENOTRECOVERABLE */
byte mutex;
bool suspect;                        /* the owner took the lock from a dead one and has not made it consistent yet */

bool over[4], died[4];               /* processes */
byte deaths;
/* What can be seen from outside. It changes in the step that marks a record as valid. */
bool is_put[TOTAL];
bool is_done[TOTAL];
bool drained;
#ifdef PLANT_two_changes
byte taken;
#endif
hidden byte i, j, slot, count;       /* values that are used only within one step */

#define inside (mem[PUTS] - mem[TAKES])
#ifdef PLANT_end_leased
#define AT_END (mem[STATE] && mem[HEAD] == NONE)
#else
#define AT_END (mem[STATE] && mem[HEAD] == NONE && mem[LEASED] == 0)
#endif
#ifdef PLANT_not_robust
#define LOCKABLE (mutex == FREE_LOCK)
#define ORPHANED false
#else
#define LOCKABLE (mutex == FREE_LOCK || mutex == DEAD)
#define ORPHANED (mutex == DEAD)
#endif

inline may_die() {
  if
  :: deaths < DEATHS -> deaths++; goto dying
  :: true
  fi
}
inline set(word, v) { at[n] = word; value[n] = v; n++ }

inline apply() {
  do
  :: valid > 0 && k < valid ->
#ifdef PLANT_relative
     mem[at[k]] = (at[k] == TAKES -> mem[TAKES] + 1 : value[k]);
#else
     mem[at[k]] = value[k];
#endif
     k++;
     may_die()
  :: else -> break
  od
}
inline clear() {
  d_step {
    valid = 0; k = 0; n = 0; i = 0;
    do :: i < MOST -> at[i] = 0; value[i] = 0; i++ :: else -> break od;
    i = 0
  }
}
/* COMMIT composes a change and marks it as valid in one step. The rest happens store by store. */
#define COMMIT(compose) may_die(); d_step { compose; MARK }; finish()
#if defined(PLANT_late)
#define MARK mem[at[0]] = value[0]; mem[at[1]] = value[1]
#elif defined(PLANT_early)
#define MARK early = n
byte early;
#else
#define MARK valid = n
#endif
inline finish() {
  may_die();
#ifdef PLANT_late
  valid = n; may_die();
#endif
#ifdef PLANT_early
  do
  :: k < early -> mem[at[k]] = value[k]; k++; may_die()
  :: else -> break
  od;
  early = 0;
#endif
  apply();
  clear();
  may_die()
}

/* At every unlock, each slot is in exactly one place, and all counts agree. */
inline look() {
  d_step {
    assert(valid == 0);
    count = 0; slot = mem[HEAD];
    do
    :: slot != NONE ->
       assert(mem[PLACE(slot)] == INSIDE && count < SLOTS);
       assert(mem[NEXT(slot)] != NONE || mem[TAIL] == slot);
       assert(is_put[payload[slot]] && !is_done[payload[slot]]);
       count++; slot = mem[NEXT(slot)]
    :: else -> break
    od;
    assert(count == inside);
    j = 2;
    do
    :: j < 4 ->
       assert((mem[LEASE_HEAD(j)] != NONE) == mem[IN_HAND(j)]);
       if
       :: mem[LEASE_HEAD(j)] != NONE ->
          slot = mem[LEASE_HEAD(j)];
          assert(slot == mem[LEASE_TAIL(j)] && mem[NEXT(slot)] == NONE);
          assert(mem[PLACE(slot)] == ON_LEASE);
          assert(is_put[payload[slot]] && !is_done[payload[slot]]);
          count++
       :: else
       fi;
       j++
    :: else -> break
    od;
    assert(mem[LEASED] == mem[IN_HAND(2)] + mem[IN_HAND(3)] && mem[USED] == count);
    slot = mem[FREE];
    do
    :: slot != NONE -> assert(mem[PLACE(slot)] == 0 && count < SLOTS); count++; slot = mem[NEXT(slot)]
    :: else -> break
    od;
    assert(count == SLOTS);
    j = 0; slot = 0;
    do
    :: j < TOTAL -> assert(!is_done[j] || is_put[j]); slot = slot + (is_put[j] && !is_done[j]); j++
    :: else -> break
    od;
    assert(slot == inside + mem[LEASED]);
    j = 0; slot = 0; count = 0
  }
}

/* `chance`: the condition for which the process waits. */
inline lock(chance) {
  LOCKABLE && (ORPHANED || (chance));
  if
  :: mutex == DEAD ->
     mutex = HELD; held = true; suspect = true;
     may_die();
#ifndef PLANT_ignore
     apply(); 
#endif
     clear();
     may_die();                      /* after this, recover() changes none of the words of this model */
#ifndef PLANT_inconsistent
     suspect = false;
#endif
     may_die()
  :: else -> mutex = HELD; held = true; may_die()
  fi
}
inline unlock() {
  may_die();
  look();
  held = false;
  mutex = (suspect -> LOST : FREE_LOCK)
}

inline compose_put() {
  slot = mem[FREE];
  assert(slot != NONE);
  payload[slot] = me * ITEMS + sent;
  set(FREE, mem[NEXT(slot)]); set(USED, mem[USED] + 1);
  set(PLACE(slot), INSIDE);
  set(NEXT(slot), NONE);
  if :: mem[HEAD] -> set(NEXT(mem[TAIL]), slot) :: else -> set(HEAD, slot) fi;
  set(TAIL, slot); set(PUTS, mem[PUTS] + 1);
  assert(!is_put[me * ITEMS + sent] && !drained);
  is_put[me * ITEMS + sent] = true; slot = 0
}
inline compose_unlink() { slot = mem[HEAD]; set(HEAD, mem[NEXT(slot)]); set(TAKES, mem[TAKES] + 1); slot = 0 }
inline compose_lease() {
  set(NEXT(slot), NONE); set(PLACE(slot), ON_LEASE);
  if :: mem[LEASE_HEAD(me)] -> set(NEXT(mem[LEASE_TAIL(me)]), slot) :: else -> set(LEASE_HEAD(me), slot) fi;
  set(LEASE_TAIL(me), slot); set(IN_HAND(me), mem[IN_HAND(me)] + 1); set(LEASED, mem[LEASED] + 1);
  assert(!drained)
}
inline compose_take() {
  slot = mem[HEAD];
  set(HEAD, mem[NEXT(slot)]); set(TAKES, mem[TAKES] + 1);
  compose_lease(); slot = 0
}
inline compose_acknowledge() {
  slot = mem[LEASE_HEAD(me)];
  set(LEASE_HEAD(me), mem[NEXT(slot)]); set(IN_HAND(me), mem[IN_HAND(me)] - 1); set(LEASED, mem[LEASED] - 1);
  set(NEXT(slot), mem[FREE]); set(PLACE(slot), 0); set(FREE, slot); set(USED, mem[USED] - 1);
  assert(is_put[payload[slot]] && !is_done[payload[slot]] && !drained);
  is_done[payload[slot]] = true; slot = 0
}
inline compose_give_back() {
  set(NEXT(mem[LEASE_TAIL(who)]), mem[HEAD]);
  if :: mem[HEAD] == NONE -> set(TAIL, mem[LEASE_TAIL(who)]) :: else fi;
  set(HEAD, mem[LEASE_HEAD(who)]); set(TAKES, mem[TAKES] - mem[IN_HAND(who)]);
  set(LEASED, mem[LEASED] - mem[IN_HAND(who)]); set(LEASE_HEAD(who), NONE); set(IN_HAND(who), 0);
  set(PLACE(mem[LEASE_HEAD(who)]), INSIDE);
  assert(!drained)
}
inline compose_leave() {
  set(OPENED + who / 2, mem[OPENED + who / 2] - 1); set(ROLE(who), 0);
#ifndef PLANT_close_apart
  if :: mem[OPENED + who / 2] == 1 -> set(STATE, 1) :: else fi
#endif
}
inline compose_close() { set(STATE, 1) }

inline end_session() {
#ifdef PLANT_close_apart
  last = (mem[OPENED + who / 2] == 1 && !mem[STATE]);
#endif
  COMMIT(compose_leave());
#ifdef PLANT_close_apart
  if :: last -> COMMIT(compose_close()); last = false :: else fi
#endif
}

#define LOCALS byte k, who; bool held
#ifdef PLANT_close_apart
bool last;
#endif

inline died_here() {
  atomic {
    died[me] = true; k = 0; n = 0;
    if :: held -> held = false; suspect = false; mutex = DEAD :: else fi;
#ifdef PLANT_close_apart
    last = false;
#endif
    if :: valid == 0 -> clear() :: else fi
  }
}

proctype writer(byte me) {
  LOCALS;
  byte sent;
  do
  :: sent < ITEMS ->
     atomic {
       lock(mem[STATE] || inside < CAP);
       if
       :: mem[STATE] -> unlock(); break
       :: !mem[STATE] && inside < CAP -> COMMIT(compose_put()); unlock(); sent++
       :: else -> unlock()           /* it came to recover, and waits on */
       fi
     }
  :: else -> break
  od;
  atomic { lock(true); who = me; end_session(); unlock(); over[me] = true };
  goto out;
dying:
  died_here();
out:
  skip
}

proctype reader(byte me) {
  LOCALS;
  do
  :: atomic {
       lock(mem[IN_HAND(me)] || mem[HEAD] || AT_END);
       if :: mem[IN_HAND(me)] -> COMMIT(compose_acknowledge()) :: else fi;
       if
       :: mem[HEAD] ->
#ifdef PLANT_two_changes
          taken = mem[HEAD];
          COMMIT(compose_unlink());
          COMMIT(slot = taken; compose_lease(); slot = 0);
#else
          COMMIT(compose_take());
#endif
          unlock()
       :: mem[HEAD] == NONE && AT_END -> drained = true; unlock(); break
       :: else -> unlock()
       fi
     };
     atomic { may_die() }            /* while it has the item on lease */
  od;
  atomic { lock(true); who = me; end_session(); unlock(); over[me] = true };
  goto out;
dying:
  died_here();
out:
  skip
}
/* Ends the sessions of dead processes. If the janitor dies, another one replaces it. */
proctype janitor() {
  LOCALS;
  byte me = 4;
again:
  do
  :: atomic {
       /* A dead process still has a session. */
       lock((died[0] && mem[ROLE(0)]) || (died[1] && mem[ROLE(1)]) ||
            (died[2] && mem[ROLE(2)]) || (died[3] && mem[ROLE(3)]));
       who = 0;
       do
       :: who < 4 ->
          if
          :: died[who] && mem[ROLE(who)] ->
             if
             :: who >= 2 && mem[LEASE_HEAD(who)] ->
                COMMIT(compose_give_back())
             :: else
             fi;
             end_session()
          :: else
          fi;
          who++
       :: else -> break
       od;
       who = 0;
       unlock()
     }
  :: atomic {
       (over[0] || (died[0] && !mem[ROLE(0)])) && (over[1] || (died[1] && !mem[ROLE(1)])) &&
       (over[2] || (died[2] && !mem[ROLE(2)])) && (over[3] || (died[3] && !mem[ROLE(3)])) && mutex == FREE_LOCK -> break
     }
  od;
  skip;
  d_step {
    assert(mem[STATE] && mem[OPENED] == 0 && mem[OPENED + 1] == 0 && mem[LEASED] == 0);
    /* the items that are left had no reader */
    assert(inside == 0 || (died[2] && died[3]));
    assert(!drained || inside == 0)
  };
  goto out;
dying:
  atomic {
    k = 0; n = 0; who = 0;
    if :: held -> held = false; suspect = false; mutex = DEAD :: else fi;
#ifdef PLANT_close_apart
    last = false;
#endif
    if :: valid == 0 -> clear() :: else fi
  };
  goto again;
out:
  skip
}

init {
  d_step {
    mem[OPENED] = 2; mem[OPENED + 1] = 2;
    mem[ROLE(0)] = 1; mem[ROLE(1)] = 1; mem[ROLE(2)] = 1; mem[ROLE(3)] = 1;
    mem[FREE] = 1; i = 1;
    do :: i < SLOTS -> mem[NEXT(i)] = i + 1; i++ :: else -> break od;
    i = 0
  };
  atomic { run writer(0); run writer(1); run reader(2); run reader(3); run janitor() }
}
