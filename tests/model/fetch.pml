/* Outputs that stay on their host, and their replays (R4). Two hosts run a maker and a reader each. Makers make OUTPUTS
   outputs from each of ITEMS items. An output stays on its host, and channel O contains a reference to it. A host may
   die between any two steps. The owner then fences it and starts another agent, and the lost outputs are made again.

   Each step of the owner is one critical section of a link or of the table of references. line.pml shows that frames
   arrive once and in order. So a frame is one step with its handling; a frame that a fenced host has sent is never
   handled. Both channels are sets here, because their order does not matter. lease.pml shows that a reader's results
   are put exactly once, so finishing an item is one step.

   step of the model                     source
   -----------------------------------   ------------------------------------------------------------------
   make: take an item                    link_sources.cpp: Source::take_one, look_for_replay
   arrive()                              link_references.cpp: Link::put, Link::add_kept, Link::replace_lost
   repair()                              references.cpp: References::repair
   settle()                              link_staged.cpp: Link::settle; link_sources.cpp: Source::settle,
                                         Source::free_settled; link_references.cpp: Link::report_if_not_remade
   read: take a reference                link_references.cpp: Link::add_reference; references.cpp: References::look
   fetch                                 link_references.cpp: Link::fetch, Link::serve_fetches, Link::to_put
   unreachable, pull()                   link_references.cpp: Link::handle_unreachable, Link::add_pulled;
                                         references.cpp: References::pull, References::pulled
   moved                                 link_references.cpp: Link::report_moves, Link::handle_moved
   release()                             references.cpp: References::release; link_sources.cpp: Source::release
   fence()                               link.cpp: Link::forget_references; references.cpp: References::lose_if;
                                         ring_leases.cpp: Ring::give_back_replays

   Left out: dead workers whose host lives, order, limits, connections that break, and the end of the channels.

   Planted faults: PLANT_no_hold (the lease of an item ends although its outputs can still be lost), PLANT_put_replays
   (outputs of replays are put), PLANT_skip_only (an output that a dead maker had already put does not replace the lost
   one), PLANT_replace_any (an output of a replay replaces one that is not lost), PLANT_no_moves (the reader does not
   learn where a lost output is now), PLANT_no_pull (nothing happens if a host cannot be reached; needs -D FAILS=1). */

#ifndef ITEMS
#define ITEMS 2
#endif
#ifndef OUTPUTS
#define OUTPUTS 1     /* per item */
#endif
#ifndef DEATHS
#define DEATHS 2
#endif
#ifndef FAILS
#define FAILS 0       /* fetches that fail although the other host lives */
#endif
#define TOTAL (ITEMS * OUTPUTS)
#define NOWHERE 2
#define KEPT(h, o) kept[(h) * TOTAL + (o)]

mtype = { NONE, THERE, HERE, LOST, GONE };

/* The owner's side: the input channel and its leases. */
bool waits[ITEMS], replay[ITEMS], settled[ITEMS];
byte maker_of[ITEMS] = NOWHERE, references[ITEMS], committed[ITEMS];
/* The table of references, and channel O. */
mtype state[TOTAL] = NONE;
byte at[TOTAL] = NOWHERE, moves[TOTAL], reader_of[TOTAL] = NOWHERE;
bool inside[TOTAL], pulling[TOTAL];
/* The hosts. A host that is not alive is fenced later, and then another agent starts with the next life. */
bool alive[2] = true, kept[2 * TOTAL];
byte life[2];
byte deaths, fails, results;
byte result[TOTAL];
hidden byte i, j;

inline repair(h, item, o) {
  if
#ifdef PLANT_replace_any
  :: true ->
#else
  :: state[o] == LOST ->
#endif
     state[o] = THERE; at[o] = h; moves[o]++; references[item]++
  :: else -> KEPT(h, o) = false      /* it is not needed, so its host frees it */
  fi
}

inline arrive(h, item, o, count) {
  KEPT(h, o) = true;
  if
#ifndef PLANT_put_replays
  :: replay[item] -> repair(h, item, o)
  :: !replay[item] && count < committed[item] ->
#else
  :: count < committed[item] ->
#endif
#ifdef PLANT_skip_only
     KEPT(h, o) = false
#else
     repair(h, item, o)
#endif
  :: else ->
     state[o] = THERE; at[o] = h; moves[o]++; inside[o] = true; references[item]++;
     committed[item] = count + 1
  fi
}

inline free_if_settled(item) {
  if
#ifdef PLANT_no_hold
  :: settled[item] ->
#else
  :: settled[item] && references[item] == 0 ->
#endif
     maker_of[item] = NOWHERE; settled[item] = false
  :: else
  fi
}

inline settle(item) {
  settled[item] = true; committed[item] = 0;
  j = 0;
  do
  :: j < OUTPUTS -> assert(!replay[item] || state[item * OUTPUTS + j] != LOST); j++   /* all are made again */
  :: else -> break
  od;
  j = 0;
  free_if_settled(item)
}

inline release(o) {
  if
  :: at[o] != NOWHERE ->
     KEPT(at[o], o) = false;
     if
     :: maker_of[o / OUTPUTS] == at[o] -> references[o / OUTPUTS]--; free_if_settled(o / OUTPUTS)
     :: else
     fi
  :: else
  fi;
  state[o] = GONE; at[o] = NOWHERE; pulling[o] = false
}

inline pull(o) {                     /* the owner gets the output over the link of the host that has it */
  state[o] = HERE; moves[o]++; pulling[o] = false
}

inline fence(h) {
  i = 0;
  do
  :: i < ITEMS ->
     if
     :: maker_of[i] == h ->
        replay[i] = replay[i] || settled[i];
        waits[i] = true; settled[i] = false; references[i] = 0; maker_of[i] = NOWHERE
     :: else
     fi;
     i++
  :: else -> break
  od;
  i = 0;
  do
  :: i < TOTAL ->
     if
     :: at[i] == h ->
        at[i] = NOWHERE; pulling[i] = false;
        if :: state[i] == THERE -> state[i] = LOST :: else fi
     :: else
     fi;
     if :: reader_of[i] == h -> reader_of[i] = NOWHERE; inside[i] = true :: else fi;
     i++
  :: else -> break
  od;
  i = 0
}

#define LIVES (alive[me] && life[me] == mine)

#define TAKE(n) \
  d_step { LIVES && n < ITEMS && waits[n % ITEMS] -> item = n; waits[item] = false; maker_of[item] = me; count = 0 }

proctype maker(byte me) {
  byte mine, item, count;
start:
  atomic { item = 0; count = 0; alive[me] || results == TOTAL -> mine = life[me] };
  do
  :: results == TOTAL -> break
  :: !LIVES -> goto start
  :: TAKE(0); goto made
  :: TAKE(1);
made:
     do
     :: d_step { LIVES && count < OUTPUTS ->
                 arrive(me, item, item * OUTPUTS + count, count); count++ }
     :: d_step { LIVES && count == OUTPUTS -> settle(item); count = 0; item = 0 };
        break
     :: !LIVES -> goto start
     od
  od
}

#define CAN_READ(o) (state[o] == THERE || state[o] == HERE)
#define LOOK \
  told = false; known = moves[o]; seen = state[o]; \
  where = at[o]; when = (at[o] < NOWHERE -> life[at[o] % 2] : 0)
#define READ(n) \
  d_step { LIVES && n < TOTAL && inside[n % TOTAL] && CAN_READ(n % TOTAL) -> \
           o = n; inside[o] = false; reader_of[o] = me; LOOK }

proctype reader(byte me) {
  byte mine, o, where, when, known;
  mtype seen;
  bool told;
start:
  atomic { o = 0; where = 0; when = 0; known = 0; seen = NONE; told = false;
           alive[me] || results == TOTAL -> mine = life[me] };
  do
  :: results == TOTAL -> break
  :: !LIVES -> goto start
  :: READ(0); goto taken
  :: READ(1); goto taken
  :: READ(2); goto taken
  :: READ(3);
taken:
     do
     :: !LIVES -> goto start
     :: d_step { LIVES && (seen == HERE || (!told && alive[where] && life[where] == when && KEPT(where, o))) ->
                 reader_of[o] = NOWHERE; result[o]++; assert(result[o] == 1); results++;
                 release(o); o = 0; where = 0; when = 0; known = 0; seen = NONE };
        break
     :: d_step { LIVES && seen == THERE && !told &&
                 (!(alive[where] && life[where] == when && KEPT(where, o)) || fails < FAILS) ->
                 if
                 :: alive[where] && life[where] == when && KEPT(where, o) -> fails++
                 :: else
                 fi;
                 told = true;
#ifndef PLANT_no_pull
                 if :: state[o] == THERE -> pulling[o] = true :: else fi
#endif
        }
#ifndef PLANT_no_moves
     :: d_step { LIVES && known != moves[o] && CAN_READ(o) -> LOOK }   /* moved */
#endif
     od
  od
}

#define PULL(n) \
  d_step { alive[me] && n < TOTAL && pulling[n % TOTAL] && state[n % TOTAL] == THERE && at[n % TOTAL] == me -> \
           pull(n % TOTAL) }

proctype host(byte me) {             /* its death, and what the owner does about it */
  byte o;
  do
  :: results == TOTAL -> break
  :: d_step { deaths < DEATHS && alive[me] ->
              deaths++; alive[me] = false; o = 0;
              do
              :: o < TOTAL -> KEPT(me, o) = false; o++
              :: else -> break
              od;
              o = 0 };
     d_step { fence(me); life[me]++; alive[me] = true }
  :: PULL(0)
  :: PULL(1)
  :: PULL(2)
  :: PULL(3)
  od
}

init {
  d_step {
    i = 0;
    do
    :: i < ITEMS -> waits[i] = true; i++
    :: else -> break
    od;
    i = 0
  };
  atomic {
    run maker(0); run maker(1); run reader(0); run reader(1); run host(0); run host(1)
  };
  (_nr_pr == 1);
  d_step {
    i = 0;
    do
    :: i < TOTAL -> assert(result[i] == 1 && state[i] == GONE && !inside[i]); i++
    :: else -> break
    od
  }
}
