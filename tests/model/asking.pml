/* Requests from remote processes to the owner of a channel, and the replies (C4, C6, C11, C12, C14). Getters take
   items from channel X. Each of these items contains channel Y. A putter, which has Y open, puts the items. One
   process owns both channels. Every other process has a control stream to the owner. Requests arrive on it once and
   in order (line.pml shows that), until the owner gives the process up. That may happen at any time.

   In the source, a process gets the items of X through its ports (line.pml, lease.pml). Here they come with the reply
   to a call. They stand for every reply that a caller must not lose, such as the reply to `make`, which has the new
   channel.

   A call is a request to the owner, which runs it in a task and replies. A caller that stops waiting tells the owner.
   The owner then cancels the task, unless the task has already taken an item. In that case, the process gets that
   item next. Once a process has lost the owner, every call raises that error, even a call that begins at that moment.

   Y exists as long as some process has it open or some item contains it. The owner counts for each process how often
   it opened and dropped Y. Over all processes, it counts how many items Y was put into (`send`), and how many of
   these are finished (`come`). One thread of a process may drop Y while another opens it again. A forked child of the
   owner (CHILD) puts items into X directly, and only reports to the owner what they contain. A process that puts Y
   into an item waits until the owner has counted the item.

   step of the model                     source
   -----------------------------------   ------------------------------------------------------------------
   post()                                connection.py: Connection.post, PendingCall
   abandon()                             connection.py: Connection.abandon; session.py: Cancel
   told()                                connection.py: Connection._received; pending_calls.py: `late` of Calls.ask
   lose()                                connection.py: Connection._lose, Connection.broken
   keep_or_use()                         remote_channel.py: unpickle_channel, remote_channel, RemoteChannel.item_done
   nudged()                              connection.py: Connection._send_notice, Connection.notify, Connection.register
   hear()                                session.py: ClientSession._receive_requests, ClientSession._do, ClientSession._do_open, ClientSession._drop
   count(), uncount()                    channel_server.py: ChannelServer.send, ChannelServer.item_done, ChannelServer.find
   take(), answer()                      session.py: ClientSession._do, ClientSession._answer
   give_up()                             session.py: ClientSession._give_up

   Left out: ports, because they are streams; calls with several channels; puts that wait for room.

   Planted faults: PLANT_forget (a caller that stops waiting forgets the call, so the item that arrives for it is
   lost), PLANT_cancel_taken (a task is cancelled although it has taken an item), PLANT_drained_at_once (the call ends
   as drained although an item has arrived for an earlier call), PLANT_deaf (a waiting caller does not learn that the
   owner is lost), PLANT_post_late (nor does a caller that begins to wait at that moment), PLANT_task_lives (the owner
   still runs requests of a process that it gave up), PLANT_open_kept (such a process still counts as having opened
   Y), PLANT_one_drop (one drop ends all openings), PLANT_come_first (an item is reported as finished before the
   channel in it is open), PLANT_not_sent (an item that contains Y is not counted), PLANT_not_awaited (an item is put
   before it is counted). */

#ifndef ITEMS
#define ITEMS 2
#endif
#ifndef GETTERS
#define GETTERS 2
#endif
#ifndef CANCELS
#define CANCELS 1
#endif
#ifndef DEATHS
#define DEATHS 1      /* how many processes the owner gives up */
#endif
#define CALLS (ITEMS + CANCELS + 1)
#define GUESTS (GETTERS + 1)
#define PUTTER GETTERS

mtype = { GET, CANCEL, PUT, OPEN, DROP, SEND, COME };              /* requests to the owner */
mtype = { ITEM, CANCELLED, DRAINED, OPENED, NOWHERE, COUNTED, BROKEN };     /* and its replies */
mtype = { NOTHING, WAITS, ABANDONED };                             /* what a process knows about its call */
mtype = { NO_TASK, WAITING, TAKEN };                               /* what the owner does for the call */

chan to_home[GUESTS] = [3] of { mtype, byte };
chan to_guest[GUESTS] = [3] of { mtype, byte, byte };
chan nudges[GUESTS] = [2 * ITEMS + 1] of { mtype };

mtype asked[GETTERS * CALLS] = NOTHING;
mtype heard[GUESTS] = NOTHING;       /* the reply to the waiting caller */
byte heard_item[GUESTS];
chan kept[GETTERS] = [CANCELS + 1] of { byte };      /* items that arrived while no caller waited */
bool lost[GUESTS], uses[GUESTS];     /* the process has lost the owner; it has Y */

mtype task[GETTERS * CALLS] = NO_TASK;
byte result[GETTERS * CALLS];
byte latest[GETTERS];                /* the latest call of each process that the owner has received */
bool given_up[GUESTS];
short counted;                       /* number of items that contain Y, as the owner counts them */
byte opens[GUESTS];
bool gone, closed;                   /* Y no longer exists; X is closed */
byte inside, put, next_out;          /* the items of X: first in, first out */
byte used[ITEMS], taken_by[ITEMS];
byte cancels, deaths, ended;
hidden byte i, n;
hidden mtype what;

#define mine(n) (g * CALLS + (n))
#define lives (counted > 0 || opens[0] > 0 || opens[GETTERS - 1] > 0 || opens[PUTTER] > 0)
#define check_Y() gone = (gone || !lives)

/* --- a remote process --- */

inline post(call) {                       /* record the request first, so that losing the owner also ends this call */
  atomic { asked[mine(call)] = WAITS; heard[g] = NOTHING };
  atomic { nfull(to_home[g]) -> to_home[g]!GET(call) };
#ifndef PLANT_post_late
  atomic {
    if
    :: lost[g] && asked[mine(call)] == WAITS -> asked[mine(call)] = NOTHING; heard[g] = BROKEN
    :: else
    fi
  }
#endif
}

inline abandon(call) {
  cancels++;
#ifdef PLANT_forget
  asked[mine(call)] = NOTHING;
#else
  asked[mine(call)] = ABANDONED;
#endif
  to_home[g]!CANCEL(call)
}

inline told() {
  to_guest[g]?what(n, i);
  if
  :: what == OPENED || what == NOWHERE || what == COUNTED -> heard[g] = what
  :: else ->
     if
     :: asked[mine(n)] == WAITS -> heard[g] = what; heard_item[g] = i
     :: asked[mine(n)] == ABANDONED && what == ITEM -> kept[g]!i
     :: else
     fi;
     asked[mine(n)] = NOTHING
  fi
}

inline lose() {
  lost[g] = true;
#ifndef PLANT_deaf
  n = 0;
  do
  :: g < GETTERS && n < CALLS ->
     if
     :: asked[mine(n)] == WAITS -> heard[g] = BROKEN
     :: else
     fi;
     asked[mine(n)] = NOTHING; n++
  :: else -> break
  od
#endif
}

inline nudge(word) {                      /* never waits; once the owner is lost, the receiver has ended */
  if
  :: atomic { !lost[g] -> nudges[g]!word }
  :: lost[g]
  fi
}

inline nudged() {
  nudges[g]?what; to_home[g]!what(0)
}

proctype ears(byte g) {
  do
  :: atomic { !lost[g] && nempty(to_guest[g]) -> told() }
  :: atomic { !lost[g] && nempty(nudges[g]) && nfull(to_home[g]) -> nudged() }
  :: atomic { given_up[g] && !lost[g] -> lose() }
  :: lost[g] -> break
  :: ended == GUESTS && empty(nudges[g]) && empty(to_guest[g]) -> break
  od
}

inline keep_or_use(item) {                /* open the channel in an item that has arrived, unless it is open */
  atomic { used[item]++; assert(used[item] == 1) };
#ifdef PLANT_come_first
  nudge(COME);
#endif
  if
  :: atomic { !uses[g] -> heard[g] = NOTHING };
     if
     :: atomic { nfull(to_home[g]) -> to_home[g]!OPEN(0) }
     :: lost[g]
     fi;
     (heard[g] != NOTHING || lost[g]);
     assert(heard[g] != NOWHERE);
     uses[g] = true
  :: uses[g]
  fi;
#ifndef PLANT_come_first
  nudge(COME);
#endif
  assert(!gone || given_up[g]);           /* this process uses Y */
  if
  :: uses[g] = false; nudge(DROP)                 /* drop Y, or keep it for the next item */
  :: true
  fi
}

proctype getter(byte g) {
  byte call, item;
  do
  :: atomic { len(kept[g]) > 0 -> kept[g]?item }; keep_or_use(item)
  :: len(kept[g]) == 0 && !lost[g] ->
     post(call);
     if
     :: heard[g] != NOTHING
     :: atomic { heard[g] == NOTHING && cancels < CANCELS && nfull(to_home[g]) -> abandon(call) }
     fi;
     call++;
     if
     :: heard[g] == ITEM -> item = heard_item[g]; keep_or_use(item)
#ifdef PLANT_drained_at_once
     :: heard[g] == DRAINED -> break
#else
     :: heard[g] == DRAINED && len(kept[g]) == 0 -> break
#endif
     :: heard[g] == BROKEN -> break
     :: else
     fi
  :: lost[g] -> break
  od;
  if
  :: uses[g] -> uses[g] = false; nudge(DROP)
  :: else
  fi;
  ended++
}

inline put_in(item) {
#ifdef CHILD
  atomic { inside++; put++ }
#else
  atomic { nfull(to_home[g]) -> to_home[g]!PUT(item) }
#endif
}

proctype putter(byte g) {
  byte item;
  do
  :: item < ITEMS && !lost[g] ->
#ifdef PLANT_not_sent
     heard[g] = COUNTED;
#else
     atomic { nfull(to_home[g]) -> heard[g] = NOTHING; to_home[g]!SEND(0) };
#endif
#ifdef PLANT_not_awaited
     heard[g] = COUNTED;
#endif
     (heard[g] != NOTHING || lost[g]);
     if
     :: heard[g] != COUNTED -> break
     :: heard[g] == COUNTED -> put_in(item)
     fi;
     item++
  :: item == ITEMS || lost[g] -> break
  od;
  nudge(DROP);
  ended++
}

/* --- the owner --- */

inline count() { counted++; check_Y() }

inline uncount() { counted--; check_Y() }

inline hear(g) {
  to_home[g]?what(n);
  if
  :: what == GET -> task[mine(n)] = WAITING; latest[g] = n
  :: what == CANCEL ->
     if
#ifdef PLANT_cancel_taken
     :: task[mine(n)] != NO_TASK -> task[mine(n)] = NO_TASK; to_guest[g]!CANCELLED(n, 0)
#else
     :: task[mine(n)] == WAITING -> task[mine(n)] = NO_TASK; to_guest[g]!CANCELLED(n, 0)
#endif
     :: else
     fi
  :: what == PUT -> inside++; put++
  :: what == SEND -> count(); to_guest[g]!COUNTED(0, 0)
  :: what == COME -> uncount()
  :: what == OPEN ->
     if
     :: gone -> to_guest[g]!NOWHERE(0, 0)
     :: else -> opens[g]++; to_guest[g]!OPENED(0, 0)
     fi
  :: what == DROP ->
#ifdef PLANT_one_drop
     opens[g] = 0;
#else
     assert(opens[g] > 0); opens[g]--;
#endif
     check_Y()
  fi
}

inline take(g, n) {
  inside--; result[mine(n)] = next_out; taken_by[next_out] = g + 1; next_out++; task[mine(n)] = TAKEN;
  assert(!given_up[g])
}

inline answer(g, n) {
  if
  :: task[mine(n)] == TAKEN -> to_guest[g]!ITEM(n, result[mine(n)])
  :: else -> to_guest[g]!DRAINED(n, 0)
  fi;
  task[mine(n)] = NO_TASK
}

inline give_up(g) {
  deaths++; given_up[g] = true;
#ifndef PLANT_task_lives
  n = 0;
  do
  :: g < GETTERS && n < CALLS -> task[mine(n)] = NO_TASK; n++
  :: else -> break
  od;
#endif
#ifndef PLANT_open_kept
  opens[g] = 0;
#endif
  check_Y()
}

proctype serve(byte g) {                  /* the owner's side for one process; all sides share one thread */
  byte call;
  do
  :: atomic { !given_up[g] && nempty(to_home[g]) && nfull(to_guest[g]) -> hear(g) }
  :: given_up[g] && nempty(to_home[g]) -> to_home[g]?_,_                /* no task will run this request */
  :: atomic { g < GETTERS && task[mine(call)] == WAITING && inside > 0 -> take(g, call) }
  :: atomic { g < GETTERS && nfull(to_guest[g]) && (task[mine(call)] == TAKEN ||
              (task[mine(call)] == WAITING && closed && inside == 0)) -> answer(g, call) }
  :: atomic { g < GETTERS && task[mine(call)] == NO_TASK && latest[g] > call -> call++ }
  :: atomic { !closed && (put == ITEMS || given_up[PUTTER]) -> closed = true }
  :: atomic { deaths < DEATHS && !given_up[g] && ended < GUESTS -> give_up(g) }
  :: ended == GUESTS && empty(to_home[g]) && (empty(nudges[g]) || lost[g]) -> break
  od
}

init {
  atomic {
    opens[PUTTER] = 1;
    n = 0;
    do
    :: n < GUESTS -> run serve(n); run ears(n); n++
    :: else -> break
    od;
    n = 0;
    do
    :: n < GETTERS -> run getter(n); n++
    :: else -> break
    od;
    run putter(PUTTER)
  };
  (_nr_pr == 1);
  atomic {
    n = 0;
    do
    :: n < GUESTS -> assert(!given_up[n] || opens[n] == 0); n++
    :: else -> break
    od;
    if
    :: deaths == 0 ->                       /* no item is lost or left over */
       n = 0;
       do
       :: n < ITEMS -> assert(used[n] == 1); n++
       :: else -> break
       od;
       assert(counted == 0 && gone)
    :: else ->                              /* an item may only be lost in transit to a process that was given up */
       n = 0;
       do
       :: n < next_out -> assert(used[n] == 1 || given_up[taken_by[n] - 1]); n++
       :: else -> break
       od
    fi
  }
}
