import threading,time,sys,traceback,os
class Watch(threading.Thread):
    def __init__(self,loop): super().__init__(daemon=True); self.loop=loop
    def run(self):
        out=open('/tmp/a2_watch','w')
        while True:
            ev=threading.Event(); t=time.perf_counter(); c=time.process_time()
            self.loop.call_soon_threadsafe(ev.set)
            dumped=False
            while not ev.wait(0.02):
                d=time.perf_counter()-t
                if d>0.05 and not dumped:
                    dumped=True
                    out.write(f'--- {d*1000:.0f} ms\n')
                    for tid,f in sys._current_frames().items():
                        if tid!=threading.get_ident(): out.write(''.join(traceback.format_stack(f)[-3:])+'\n')
                    out.flush()
            d=time.perf_counter()-t
            if d>0.05: out.write(f'=== total {d*1000:.0f} cpu {1000*(time.process_time()-c):.0f} load {os.getloadavg()[0]}\n'); out.flush()
            time.sleep(0.01)
