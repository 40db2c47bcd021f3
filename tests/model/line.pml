/* Exactly once between hosts (C11). Workers on other hosts read channel I and write channel O, which are both on the
   owner's host. Connections break, and hosts and workers die. This models the messages that a link sends for its
   streams (the names here call a stream a "line").

   A stream is the part of a link that serves one remote worker. Its items are numbered 0, 1, 2, … in the order in
   which the owner leased them, and its outputs are counted per port. All messages report absolute states, so a new
   connection needs no log of the old one:

     owner to host   OUTPUT(got of each port)   ITEM(n)        RECALL                END
     host to owner   INPUT(got, done)           OUT(port, n)   RECALLED(got, done)   END

   The owner keeps an item on lease until it knows that the worker has finished the item, and all of the item's
   outputs are in O. An output that has arrived waits in the owner's memory until it can be put into O. The owner
   learns from `done` that an item is finished. `done` is sent after the outputs of all earlier items. The owner also
   learns it from an output of a later item, because over all ports of a stream, the outputs of earlier items are sent
   first. For each port, the owner remembers how many outputs of the latest item are in O. So it puts an output into O
   only after the leases of all earlier items have ended. On a new connection, each side first drops the former
   connection and then reports what it has received. The other side goes on from there. If the owner gives a host up,
   it fences the host: it drops the connection and gives the items back. For each unfinished item, it keeps the counts
   for the worker that takes the item over. The host's replacement starts without state. From then on, it does not
   matter whether the host still runs.

   The owner may recall items that a worker has not started. The host forgets them and reports how many are left. The
   owner gives the others back, and sends no items until this report arrives. After a break, it asks again over the
   new connection.

   lease.pml shows what happens in a host's own rings when one of its workers dies. Here only the result appears: the
   replacement takes the leased item, and skips outputs that are already in the host's ring. Each critical section is
   one step. A connection delivers messages in order. It may be dropped at any time, and then loses the messages in
   flight.

   step of the model                     source
   -----------------------------------   ------------------------------------------------------------------
   take()                                link_sources.cpp: Source::take, Source::wants
   settle()                              link_staged.cpp: Link::settle; link_sources.cpp: Source::free_oldest
   put_next()                            link_staged.cpp: Link::move_staged; link_receive.cpp: Link::is_settled;
                                         link_sinks.cpp: Sink::begin, Sink::put; ring_turns.cpp: Ring::begin_item
   hear_at_home()                        link_receive.cpp: Link::handle_input, Link::handle_item, Link::handle_end,
                                         Link::is_valid_key; link_sources.cpp: Source::resume_after
   at_home: OUTPUT, ITEM, END            link_send.cpp: Link::serve_as_owner, Link::add_end
   at_home: another connection           link.cpp: Link::take_over
   give_up()                             link.cpp: Link::drop_stream; recovery.py: take_up;
                                         ring_sessions.cpp: Ring::retire_writer
   hear_at_host()                        link_receive.cpp: Link::handle_item, Link::handle_output, Link::handle_end
   say_input(), say_output()             link_send.cpp: Link::add_progress, Link::add_outputs;
                                         link_sources.cpp: Source::first_key
   dial_again()                          link.cpp: Link::take_over; link_ports.hpp: Source::connect

   Left out: ordered outputs, gathered items, large items, and the limit on data in flight. (An output may wait at the
   owner for any length of time.)

   Planted faults: PLANT_custody_on_got (a lease at the owner ends as soon as the host has the item), PLANT_say_first
   (the owner reports what it got, but still reads from the former connection), PLANT_no_fence (messages from before a
   host was given up count as those of its replacement), PLANT_done_early (`done` is sent before the outputs),
   PLANT_put_ahead (outputs of the next item are put into O while an earlier item is on lease), PLANT_by_port (the
   outputs of each port are sent as soon as they are made), PLANT_output_first (over a new connection, outputs are
   sent before the host reports the items it received), PLANT_end_ahead (a lease ends while outputs wait for room),
   PLANT_forget (the counts are forgotten when a host dies), PLANT_no_inherit (a worker that takes over an item does
   not adopt the count that was kept for it), PLANT_no_resend (what was sent over an earlier connection counts as
   received), PLANT_state_lost, PLANT_end_lost, PLANT_recall_lost (the state, the end or the recall is not sent again
   over a new connection), PLANT_recall_begun (the item in progress is also recalled), PLANT_stale_answer (an answer
   from the former connection counts), PLANT_send_on (the owner sends items while it waits for the report). */

#ifndef ITEMS
#define ITEMS 2
#endif
#ifndef OUTPUTS
#define OUTPUTS 2     /* outputs per item and port */
#endif
#ifndef PORTS
#define PORTS 1
#endif
#ifndef LINES
#define LINES 1
#endif
#ifndef WINDOW
#define WINDOW 2      /* items that a worker may have ahead */
#endif
#ifndef BREAKS
#define BREAKS 1
#endif
#ifndef HOSTS
#define HOSTS 1       /* hosts that die */
#endif
#ifndef WORKERS
#define WORKERS 1     /* workers that die while their host lives on */
#endif
#ifndef RECALLS
#define RECALLS 0
#endif
#ifndef WIRE
#define WIRE 2        /* messages in flight */
#endif
#define OF_PORT (ITEMS * OUTPUTS)

mtype = { QUEUED, LEASED, FINISHED };
mtype = { OUTPUT, ITEM, RECALL, INPUT, RECALLED, OUT, END };

/* Each stream has two connections, one of which is in use. */
chan to_host[LINES * 2] = [WIRE] of { mtype, byte, byte };
chan to_home[LINES * 2] = [WIRE] of { mtype, byte, byte };

/* Channels I and O, at the owner. */
mtype item[ITEMS] = QUEUED;
byte output[OF_PORT * PORTS];        /* how often each output is in O */
byte kept[ITEMS * PORTS];            /* per item whose host died: how many of its outputs are in O */
byte waiting = ITEMS, finished;

typedef Home {                       /* the owner's side of a stream */
  bit connection;
  bool said, known, end_said, ended;
  bool recalls, recall_said;         /* it waits for recalled items; it has sent the recall over this connection */
  byte leased[ITEMS];                /* n -> item */
  byte taken, sent, done, heard;     /* items: leased; sent; no longer leased; reported as done by the host */
  byte got[PORTS], used[PORTS];      /* outputs: received; put into O, now or earlier */
  byte latest[PORTS];                /* item + 1 whose outputs the writer session of O counts */
  byte count[PORTS], skip_[PORTS]    /* how many of these outputs are in O, and how many were there at first */
};
typedef Host {                       /* the other side, and the worker */
  bit connection;
  bool said, known, end_said, end_got, answers;
  byte got, taken, done, position;   /* items: received; started; finished. position: outputs of the current item */
  byte put[PORTS], sent[PORTS];      /* outputs */
  byte done_said
};
Home home[LINES];
Host host[LINES];

byte breaks, deaths, losses, called, ended;
hidden byte i, n, p, q;

#define in_use(end) (2 * l + end[l].connection)
#define other(end) (2 * l + 1 - end[l].connection)
#define have(counts, n) (counts[0] >= (n) * OUTPUTS && counts[PORTS - 1] >= (n) * OUTPUTS)
#ifdef PLANT_send_on
#define may_send() true
#else
#define may_send() (!home[l].recalls)
#endif
#ifdef PLANT_by_port
#define in_turn(p) true
#else
#define in_turn(p) have(host[l].sent, host[l].sent[p] / OUTPUTS)
#endif
#ifdef PLANT_output_first
#define may_say_output(p) (host[l].known && host[l].sent[p] < host[l].put[p] && in_turn(p))
#else
#define may_say_output(p) (host[l].said && host[l].known && host[l].sent[p] < host[l].put[p] && in_turn(p))
#endif
#define waits(p) (home[l].used[p] < home[l].got[p])
#define key(p) (home[l].used[p] / OUTPUTS)           /* the item of the first waiting output */
#ifdef PLANT_put_ahead
#define may_put(p) waits(p)
#else
#define may_put(p) (waits(p) && key(p) <= home[l].done)
#endif
#ifdef PLANT_end_ahead
#define all_put(p) true
#else
#define all_put(p) (!waits(p) || key(p) > home[l].done)
#endif

inline drop(wire) {
  do
  :: nempty(wire) -> wire?_,_,_
  :: empty(wire) -> break
  od
}

/* --- the owner --- */

inline take() {                      /* leases the item at the front of I */
  i = 0;
  do
  :: item[i] != QUEUED -> i++
  :: else -> break
  od;
  item[i] = LEASED; home[l].leased[home[l].taken] = i; home[l].taken++; waiting--
}

inline settle() {
  do
  :: home[l].done < home[l].heard && all_put(0) && all_put(PORTS - 1) ->
     assert(home[l].done < home[l].taken);
     item[home[l].leased[home[l].done]] = FINISHED; finished++; home[l].done++
  :: else -> break
  od
}

inline put_next(port) {                   /* puts a waiting output into O, as an output of its item */
  i = home[l].leased[key(port)];
  n = home[l].used[port] - OUTPUTS * key(port);      /* number of the output among those of its item */
  if
  :: n == 0 ->                                       /* from now on, the session counts this item's outputs */
     home[l].skip_[port] = kept[i * PORTS + port];
#ifndef PLANT_no_inherit
     if
     :: kept[i * PORTS + port] > 0 ->
        home[l].latest[port] = i + 1; home[l].count[port] = kept[i * PORTS + port]
     :: else
     fi;
#endif
     kept[i * PORTS + port] = 0
  :: else
  fi;
  if
  :: n >= home[l].skip_[port] ->
     output[(i * OUTPUTS + n) * PORTS + port]++;
     assert(output[(i * OUTPUTS + n) * PORTS + port] == 1);
     assert(n == 0 || output[(i * OUTPUTS + n - 1) * PORTS + port] == 1);
     home[l].latest[port] = i + 1; home[l].count[port] = n + 1
  :: else                                            /* the output is already in O */
  fi;
  home[l].used[port]++;
  settle()
}

inline give_back() {                 /* gives the item that was leased last back to the front of I */
  home[l].taken--; item[home[l].leased[home[l].taken]] = QUEUED; home[l].leased[home[l].taken] = 0; waiting++
}

inline hear_at_home(wire) {
  if
  :: wire?INPUT(i, n) ->
     if
     :: !home[l].known -> home[l].known = true; home[l].sent = i
     :: else
     fi;
#ifdef PLANT_custody_on_got
     n = i;
#endif
     home[l].heard = (n > home[l].heard -> n : home[l].heard);
     settle()
  :: wire?RECALLED(i, n) ->
     home[l].known = true; home[l].sent = i; home[l].recalls = false;
     home[l].heard = (n > home[l].heard -> n : home[l].heard);
     settle();
     do
     :: home[l].taken > i -> give_back()
     :: else -> break
     od
  :: wire?OUT(p, q) ->
     assert(q == home[l].got[p] / OUTPUTS && q >= home[l].done && q < home[l].sent);
     home[l].got[p]++;
     home[l].heard = (q > home[l].heard -> q : home[l].heard);
     settle()
  :: wire?END(_, _) ->
     assert(home[l].done == home[l].taken);
     ended = (home[l].ended -> ended : ended + 1); home[l].ended = true
  fi
}

inline give_up() {
  p = 0;
  do
  :: p < PORTS ->
     i = home[l].latest[p];
#ifndef PLANT_forget
     if
     :: i > 0 && item[i - 1] == LEASED -> kept[(i - 1) * PORTS + p] = home[l].count[p]
     :: else
     fi;
#endif
     home[l].got[p] = 0; home[l].used[p] = 0; home[l].latest[p] = 0; home[l].count[p] = 0; home[l].skip_[p] = 0;
     host[l].put[p] = 0; host[l].sent[p] = 0; p++
  :: else -> break
  od;
  do
  :: home[l].taken > home[l].done -> give_back()
  :: else -> break
  od;
  n = 0;
  do
  :: n < ITEMS -> home[l].leased[n] = 0; n++
  :: else -> break
  od;
#ifndef PLANT_no_fence
  drop(to_home[2 * l]); drop(to_home[2 * l + 1]);
  home[l].connection = 0; host[l].connection = 0;
#endif
  drop(to_host[2 * l]); drop(to_host[2 * l + 1]);
  home[l].said = false; home[l].known = false; home[l].end_said = false;
  home[l].recalls = false; home[l].recall_said = false;
  home[l].taken = 0; home[l].sent = 0; home[l].done = 0; home[l].heard = 0;
  host[l].said = false; host[l].known = false; host[l].end_said = false; host[l].end_got = false;
  host[l].answers = false; host[l].taken = 0;
  host[l].got = 0; host[l].done = 0; host[l].position = 0; host[l].done_said = 0
}

proctype at_home(byte l) {
  do
  :: atomic { waiting > 0 && home[l].taken - home[l].done < WINDOW -> take() }
  :: atomic { !home[l].said && nfull(to_host[in_use(home)]) ->
       home[l].said = true; to_host[in_use(home)]!OUTPUT(home[l].got[0], home[l].got[PORTS - 1]) }
  :: atomic { home[l].said && home[l].known && may_send() && home[l].sent < home[l].taken &&
              nfull(to_host[in_use(home)]) ->
       to_host[in_use(home)]!ITEM(home[l].sent, 0); home[l].sent++ }
  :: atomic { called < RECALLS && home[l].known && home[l].sent > home[l].done && !home[l].recalls ->
       called++; home[l].recalls = true; home[l].recall_said = false }
  :: atomic { home[l].recalls && home[l].said && !home[l].recall_said && nfull(to_host[in_use(home)]) ->
       home[l].recall_said = true; to_host[in_use(home)]!RECALL(0, 0) }
  :: atomic { home[l].known && finished == ITEMS && !home[l].end_said && nfull(to_host[in_use(home)]) ->
       home[l].end_said = true; to_host[in_use(home)]!END(0, 0) }
  :: atomic { nempty(to_home[in_use(home)]) -> hear_at_home(to_home[in_use(home)]) }
  :: atomic { may_put(0) -> put_next(0) }
#if PORTS == 2
  :: atomic { may_put(1) -> put_next(1) }
#endif
#ifdef PLANT_say_first
  :: atomic { nempty(to_home[other(home)]) -> hear_at_home(to_home[other(home)]) }
#endif
  :: atomic { home[l].connection != host[l].connection ->      /* the host has connected again */
       drop(to_host[in_use(home)]);                            /* nobody reads this connection any more */
#ifndef PLANT_say_first
       drop(to_home[in_use(home)]);
#endif
       home[l].connection = host[l].connection;
       home[l].said = false; home[l].known = false; home[l].sent = home[l].done;
#ifndef PLANT_recall_lost
       home[l].recall_said = false;
#endif
#ifndef PLANT_end_lost
       home[l].end_said = false
#endif
     }
  :: atomic { deaths < HOSTS && !home[l].ended -> deaths++; give_up() }
  :: home[l].ended -> break
  od
}

/* --- the other host --- */

inline hear_at_host(wire) {
  if
  :: wire?OUTPUT(i, n) ->
     host[l].known = true;
#ifndef PLANT_no_resend
     host[l].sent[0] = i; host[l].sent[PORTS - 1] = n
#endif
  :: wire?ITEM(i, _) ->
     assert(i == host[l].got && host[l].got - host[l].done < WINDOW);
     host[l].got++
  :: wire?RECALL(_, _) ->
#ifdef PLANT_recall_begun
     host[l].taken = host[l].done; host[l].position = 0;
#endif
     host[l].got = host[l].taken; host[l].answers = true
  :: wire?END(_, _) -> host[l].end_got = true
  fi
}

#ifdef PLANT_done_early
#define may_say_done() (host[l].done_said < host[l].done)
#else
#define may_say_done() (host[l].done_said < host[l].done && have(host[l].sent, host[l].done_said + 1))
#endif

inline say_input() {
  host[l].said = true;
  do
  :: may_say_done() -> host[l].done_said++
  :: else -> break
  od;
  if
  :: host[l].answers -> host[l].answers = false; to_home[in_use(host)]!RECALLED(host[l].got, host[l].done_said)
  :: else -> to_home[in_use(host)]!INPUT(host[l].got, host[l].done_said)
  fi
}

inline say_output(port) {
  to_home[in_use(host)]!OUT(port, host[l].sent[port] / OUTPUTS); host[l].sent[port]++
}

inline work() {                      /* makes the worker's next output, unless it is already in the host's ring */
  p = host[l].position % PORTS;
  n = host[l].done * OUTPUTS + host[l].position / PORTS;
  host[l].put[p] = (n < host[l].put[p] -> host[l].put[p] : n + 1);
  host[l].position++
}

inline dial_again() {
  drop(to_host[in_use(host)]);
  host[l].connection = 1 - host[l].connection;
#ifndef PLANT_state_lost
  host[l].said = false; host[l].done_said = 0;
#endif
  host[l].known = false; host[l].end_said = false;
#ifndef PLANT_stale_answer
  host[l].answers = false;
#endif
#ifndef PLANT_no_resend
  host[l].sent[0] = 0; host[l].sent[PORTS - 1] = 0
#endif
}

proctype at_host(byte l) {
  do
  :: atomic { host[l].done == host[l].taken && host[l].taken < host[l].got -> host[l].taken++ }
  :: atomic { host[l].done < host[l].taken && host[l].position < OUTPUTS * PORTS -> work() }
  :: atomic { host[l].done < host[l].taken && host[l].position == OUTPUTS * PORTS ->
       host[l].position = 0; host[l].done++ }
  :: atomic { host[l].position > 0 && losses < WORKERS -> losses++; host[l].position = 0 }
  :: atomic { (!host[l].said || may_say_done() || host[l].answers) && nfull(to_home[in_use(host)]) -> say_input() }
  :: atomic { may_say_output(0) && nfull(to_home[in_use(host)]) -> say_output(0) }
#if PORTS == 2
  :: atomic { may_say_output(1) && nfull(to_home[in_use(host)]) -> say_output(1) }
#endif
  :: atomic { host[l].end_got && host[l].known && !host[l].end_said && host[l].done_said == host[l].got &&
              nfull(to_home[in_use(host)]) -> host[l].end_said = true; to_home[in_use(host)]!END(0, 0) }
  :: atomic { nempty(to_host[in_use(host)]) -> hear_at_host(to_host[in_use(host)]) }
  :: atomic { breaks < BREAKS && home[l].connection == host[l].connection && empty(to_home[other(host)]) &&
              !home[l].ended -> breaks++; dial_again() }
  :: home[l].ended -> break
  od
}

init {
  byte l;
  atomic {
    do
    :: l < LINES -> run at_home(l); run at_host(l); l++
    :: else -> break
    od
  };
  (ended == LINES);
  assert(finished == ITEMS);
  atomic {
    n = 0;
    do
    :: n < OF_PORT * PORTS -> assert(output[n] == 1); n++
    :: else -> break
    od
  }
}
